// What the programs of JavaScript share: the questions, the tool, and the report that they print.
export const model = process.env.GRAFTWORK_MODEL;
export const questions = ["What is the weather in Paris?", "And in Oslo?"];
export const parameters = {
  type: "object",
  properties: { city: { type: "string", description: "Where." } },
  required: ["city"],
  additionalProperties: false,
};
const results = { Paris: "20 degrees in Paris", Oslo: "5 degrees in Oslo" };

// The tool's calls, the final text of each turn, and the prompt and completion tokens of each request.
const report = { calls: [], answers: [], usage: [] };

export function getWeather({ city }) {
  report.calls.push({ city });
  return results[city];
}

export function answered(text) {
  report.answers.push(text);
}

export function count(promptTokens, completionTokens) {
  report.usage.push([promptTokens, completionTokens]);
}

export function printReport() {
  console.log(JSON.stringify(report));
}
