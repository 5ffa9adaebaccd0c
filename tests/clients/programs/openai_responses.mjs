// `openai` for JavaScript on Responses. History: sent by the client or kept by the server. Mode: plain or streamed.
import OpenAI from "openai";
import { answered, count, getWeather, model, parameters, printReport, questions } from "./weather.mjs";

const [history, mode] = process.argv.slice(2);
const client = new OpenAI();
const tools = [{ type: "function", name: "get_weather", description: "The weather now.", parameters, strict: true }];
const past = [];
let previous;

async function answer(items) {
  past.push(...items);
  const sent = history === "sent" ? { input: past } : { input: items, previous_response_id: previous };
  const request = { model, tools, ...sent };
  const response = await (mode === "plain"
    ? client.responses.create(request)
    : client.responses.stream(request).finalResponse());
  count(response.usage.input_tokens, response.usage.output_tokens);
  past.push(...response.output);
  previous = response.id;
  return response;
}

for (const content of questions) {
  let response = await answer([{ role: "user", content }]);
  for (;;) {
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) break;
    const outputs = calls.map((call) => ({
      type: "function_call_output",
      call_id: call.call_id,
      output: getWeather(JSON.parse(call.arguments)),
    }));
    response = await answer(outputs);
  }
  answered(response.output_text ?? response.output[0].content[0].text);
}
printReport();
