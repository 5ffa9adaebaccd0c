// Turns the items of a session into the messages of a chat.

export function messagesOf(instructions, items) {
  const messages = instructions ? [{ role: "system", content: instructions }] : [];
  for (const item of items) {
    if (item.type === "message") messages.push({ role: item.role === "developer" ? "system" : item.role, content: (item.content ?? []).map((part) => part.text).join("") });
    else if (item.type === "function_call") addCall(messages, item);
    else if (item.type === "function_call_output") messages.push({ role: "tool", tool_call_id: item.call_id, content: item.output });
  }
  return messages;
}

function addCall(messages, item) {
  const call = { id: item.call_id, type: "function", function: { name: item.name, arguments: item.arguments } };
  const last = messages.at(-1);
  if (last?.role === "assistant") (last.tool_calls ??= []).push(call);
  else messages.push({ role: "assistant", content: "", tool_calls: [call] });
}

/** The messages as the API takes them: without the figures that the lane keeps with them. */
export function toSend(system, messages) {
  const first = system && messages[0]?.role !== "system" ? [{ role: "system", content: system }] : [];
  return [...first, ...messages.map(({ role, content, reasoning, tool_calls, tool_call_id }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}), ...(tool_calls?.length ? { tool_calls } : {}), ...(tool_call_id ? { tool_call_id } : {}) }))];
}

/** The calls at the end of the messages that have no output yet. */
export function openCalls(messages) {
  const at = messages.findLastIndex((message) => message.role === "assistant");
  const answered = new Set(messages.slice(at + 1).filter((message) => message.role === "tool").map((message) => message.tool_call_id));
  return at === -1 ? [] : (messages[at].tool_calls ?? []).filter((call) => !answered.has(call.id));
}
