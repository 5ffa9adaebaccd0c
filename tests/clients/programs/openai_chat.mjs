// `openai` for JavaScript on Chat Completions. Mode: plain, streamed, or runner for the package's own loop.
import OpenAI from "openai";
import { answered, count, getWeather, model, parameters, printReport, questions } from "./weather.mjs";

const mode = process.argv[2];
const client = new OpenAI();
const messages = [];
const declared = { name: "get_weather", description: "The weather now.", parameters };
const tools = [{ type: "function", function: declared }];

async function answer() {
  if (mode === "plain") return client.chat.completions.create({ model, messages, tools });
  const stream = client.chat.completions.stream({ model, messages, tools, stream_options: { include_usage: true } });
  return stream.finalChatCompletion();
}

async function loop() {
  for (;;) {
    const completion = await answer();
    count(completion.usage.prompt_tokens, completion.usage.completion_tokens);
    const { message } = completion.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      const content = getWeather(JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
}

async function runner() {
  const run = { ...declared, function: getWeather, parse: JSON.parse };
  const running = client.chat.completions.runTools({ model, messages, tools: [{ type: "function", function: run }] });
  const text = await running.finalContent();
  messages.splice(0, messages.length, ...running.messages);
  for (const { usage } of running.allChatCompletions()) count(usage.prompt_tokens, usage.completion_tokens);
  return text;
}

for (const content of questions) {
  messages.push({ role: "user", content });
  answered(await (mode === "runner" ? runner() : loop()));
}
printReport();
