// The Vercel AI SDK: its loop runs the tool. Provider: default (Responses), chat, or compatible. Mode: plain or streamed.
import { openai } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { answered, count, getWeather, model, printReport, questions } from "./weather.mjs";

const [provider, mode] = process.argv.slice(2);
const compatible = createOpenAICompatible({
  name: "graftwork",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
});
const models = { default: () => openai(model), chat: () => openai.chat(model), compatible: () => compatible(model) };
const tools = {
  get_weather: tool({
    description: "The weather now.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => getWeather(input),
  }),
};
const messages = [];

for (const content of questions) {
  messages.push({ role: "user", content });
  const request = { model: models[provider](), tools, messages, stopWhen: stepCountIs(5) };
  let failure;
  const result =
    mode === "plain"
      ? await generateText(request)
      : streamText({ ...request, onError: ({ error }) => (failure = error) });
  if (mode === "streamed") await result.consumeStream();
  if (failure) throw failure;
  for (const { usage } of await result.steps) count(usage.inputTokens, usage.outputTokens);
  answered(await result.text);
  messages.push(...(await result.response).messages);
}
printReport();
