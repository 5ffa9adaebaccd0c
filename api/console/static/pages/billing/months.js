// Calendar months in UTC, such as "2026-11": what an invoice is for.

const NAMES = new Intl.DateTimeFormat("en-GB", { month: "long", year: "numeric", timeZone: "UTC" });

/** The last months, the present one first. */
export function lastMonths(number, now = new Date()) {
  return Array.from({ length: number }, (_, back) => textOf(new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1))));
}

export function isMonth(text) {
  return /^\d{4}-(0[1-9]|1[0-2])$/.test(text);
}

/** `November 2026` */
export function monthName(month) {
  return isMonth(month) ? NAMES.format(new Date(`${month}-01T00:00:00Z`)) : month;
}

/** The beginning of a month and of the next one, as the API takes times. */
export function spanOf(month) {
  const [year, number] = month.split("-").map(Number);
  return { from: `${month}-01T00:00:00Z`, to: `${textOf(new Date(Date.UTC(year, number, 1)))}-01T00:00:00Z` };
}

function textOf(date) {
  return date.toISOString().slice(0, 7);
}
