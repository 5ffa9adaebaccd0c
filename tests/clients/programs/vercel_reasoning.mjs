// The Vercel AI SDK reads what the model thought before its answer. Mode: plain or streamed.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [mode] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "graftwork",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const request = { model: provider(process.env.GRAFTWORK_MODEL), prompt: "Hi" };
const result = mode === "plain" ? await generateText(request) : streamText(request);
if (mode === "streamed") await result.consumeStream();
console.log(JSON.stringify({ reasoning: await result.reasoningText, text: await result.text }));
