"""What the demo tools return: `run_tool` gives plausible results that depend on the arguments alone.

Results never come from a network or a clock, so that a conversation can be replayed.
A failure is a result too: `{"error": "..."}`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from random import Random
from typing import Any
from zlib import crc32

from graftwork.demo.lexicon import WEEKDAYS, Lexicon, listed

Arguments = Mapping[str, Any]
Result = dict[str, Any]

CONDITIONS = listed("sunny cloudy rainy windy foggy stormy snowy clear")
ORDER_STATES = listed("packed shipped delayed processing")
TICKET_STATES = listed("open waiting resolved")
ARTICLE_KINDS = ("How to fix the", "Guide to the", "First steps with the", "Known problems of the")

METRES_AND_KILOGRAMS = {
    "km": ("length", 1000.0),
    "meters": ("length", 1.0),
    "cm": ("length", 0.01),
    "miles": ("length", 1609.344),
    "feet": ("length", 0.3048),
    "inches": ("length", 0.0254),
    "kg": ("mass", 1.0),
    "grams": ("mass", 0.001),
    "pounds": ("mass", 0.45359237),
    "ounces": ("mass", 0.028349523),
    "liters": ("volume", 1.0),
    "gallons": ("volume", 3.785411784),
    "hours": ("time", 60.0),
    "minutes": ("time", 1.0),
}

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def run_tool(name: str, arguments: Arguments, lexicon: Lexicon | None = None) -> Result:
    """The result of one call.

    Training passes a `lexicon`, so that the same call has many results and none can be learned by heart.
    Raises KeyError for an unknown tool or a missing argument.
    """
    if lexicon is None:
        lexicon = Lexicon(Random(crc32(f"{name}|{sorted(arguments.items())}".encode())))
    return RESULTS[name](arguments, lexicon)


def weather(arguments: Arguments, lexicon: Lexicon) -> Result:
    temperature = lexicon.random.randint(-9, 39)
    condition = lexicon.random.choice(CONDITIONS)
    return {"city": arguments["city"], "day": arguments["day"], "temperature": temperature, "condition": condition}


def local_time(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"city": arguments["city"], "time": lexicon.clock_time()}


def calculation(arguments: Arguments, lexicon: Lexicon) -> Result:
    try:
        return {"result": tidy(evaluate_sum(ast.parse(str(arguments["expression"]).strip(), mode="eval").body), 2)}
    except ZeroDivisionError:
        return {"error": "division by zero"}
    except (SyntaxError, ValueError):
        return {"error": "not a sum"}


def evaluate_sum(node: ast.expr) -> float:
    """Only numbers, the four operations and a minus sign; anything else raises ValueError."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return float(OPERATORS[type(sign)](evaluate_sum(left), evaluate_sum(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate_sum(operand)
    raise ValueError("not a sum")


def tidy(value: float, places: int) -> float:
    """Rounded, and an int when nothing is left behind the point."""
    rounded = round(value, places)
    return int(rounded) if rounded == int(rounded) else rounded


def order(arguments: Arguments, lexicon: Lexicon) -> Result:
    status = lexicon.random.choice(ORDER_STATES)
    return {"order_id": arguments["order_id"], "status": status, "arrives": lexicon.random.choice(WEEKDAYS)}


def new_event(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"event_id": lexicon.digits(4), "title": arguments["title"], "status": "created"}


def events(arguments: Arguments, lexicon: Lexicon) -> Result:
    count = lexicon.random.choice((0, 1, 1, 2, 2))
    found = [{"time": lexicon.meeting_time(), "title": lexicon.title()} for _ in range(count)]
    return {"day": arguments["day"], "events": found}


def conversion(arguments: Arguments, lexicon: Lexicon) -> Result:
    kind, factor = METRES_AND_KILOGRAMS.get(arguments["from_unit"], ("unknown", 1.0))
    other_kind, other_factor = METRES_AND_KILOGRAMS.get(arguments["to_unit"], ("other", 1.0))
    if kind != other_kind:
        return {"error": "units do not match"}
    return {"value": tidy(float(arguments["value"]) * factor / other_factor, 2), "unit": arguments["to_unit"]}


def contact(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"name": arguments["name"], "phone": lexicon.phone()}


def new_ticket(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"ticket_id": lexicon.reference(), "title": arguments["title"], "priority": arguments["priority"]}


def ticket_state(arguments: Arguments, lexicon: Lexicon) -> Result:
    status = lexicon.random.choice(TICKET_STATES)
    return {"ticket_id": arguments["ticket_id"], "status": status, "agent": lexicon.person()}


def assignment(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"ticket_id": arguments["ticket_id"], "agent": arguments["agent"], "queue": lexicon.random.randint(0, 30)}


def closing(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"ticket_id": arguments["ticket_id"], "status": "closed", "hours": lexicon.random.randint(1, 99)}


def escalation(arguments: Arguments, lexicon: Lexicon) -> Result:
    return {"ticket_id": arguments["ticket_id"], "team": arguments["team"], "reply_by": lexicon.meeting_time()}


def articles(arguments: Arguments, lexicon: Lexicon) -> Result:
    title = f"{lexicon.random.choice(ARTICLE_KINDS)} {arguments['query']}"
    return {"article": f"KB-{lexicon.digits(4)}", "title": title}


RESULTS: dict[str, Callable[[Arguments, Lexicon], Result]] = {
    "get_weather": weather,
    "get_time": local_time,
    "calculate": calculation,
    "get_order": order,
    "create_event": new_event,
    "list_events": events,
    "convert_units": conversion,
    "find_contact": contact,
    "open_ticket": new_ticket,
    "ticket_status": ticket_state,
    "assign_ticket": assignment,
    "close_ticket": closing,
    "escalate_ticket": escalation,
    "search_articles": articles,
}
