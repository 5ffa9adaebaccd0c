// Turns numbers and times into short texts. A missing value is a dash.

const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Number(value).toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 100 ? 1 : 0 });
}

export function short(value) {
  if (value === null || value === undefined) return NONE;
  return Number(value).toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  let rest = Number(value);
  while (rest >= 1000 && at < units.length - 1) { rest /= 1000; at += 1; }
  return `${rest.toLocaleString("en", { maximumFractionDigits: rest < 10 && at ? 1 : 0 })} ${units[at]}`;
}

export function percent(share) {
  return share === null || share === undefined || Number.isNaN(share) ? NONE : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** Seconds as a span: 0.25 is "250 ms". */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 && !Number.isInteger(seconds) ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function ago(at, now = Date.now() / 1000) {
  if (at === null || at === undefined) return NONE;
  const passed = now - at;
  return passed < 5 ? "just now" : `${span(passed < 60 ? Math.round(passed) : passed)} ago`;
}

export function moment(at) {
  if (at === null || at === undefined) return NONE;
  return new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

/** `2 sessions`, `1 session`. */
export function many(number, noun) {
  const plural = noun === "person" ? "people" : noun.endsWith("y") && !noun.endsWith("ey") ? `${noun.slice(0, -1)}ies` : `${noun}s`;
  return `${count(number)} ${number === 1 ? noun : plural}`;
}

/** The end of an id, enough to tell two of them apart. */
export function tail(id) {
  return id && id.length > 14 ? `${id.slice(0, 4)}…${id.slice(-6)}` : id ?? NONE;
}
