"""One session in two branches: they share their past and its cache, and go different ways."""

from graftwork import Graftwork

with Graftwork() as client:
    session = client.sessions.create(model="graftwork-demo", sampling={"temperature": 0})
    session.turn("Hello, I am Ada.")
    asked = session.turn("What can you do?")

    # Both branches begin where the session stands now; nothing is copied or computed again.
    left, right = session.fork(count=2)
    answers = [(branch, branch.turn(question)) for branch, question in ((left, "Who are you?"), (right, "Thank you!"))]
    for branch, turn in answers:
        assert turn.usage is not None
        cached = turn.usage.prompt_tokens_details.cached_tokens
        print(f"{branch.id}: {turn.text!r}, {cached} of {turn.usage.prompt_tokens} prompt tokens cached")

    # Going back works too: the session's next turn starts from this checkpoint.
    session.turn("Goodbye!")
    assert asked.checkpoint_id is not None
    session.rewind(asked.checkpoint_id)
    print("The session has", len(session.items()), "items again, a branch has", len(left.items()))
