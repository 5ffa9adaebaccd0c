// Amounts of money. They come as decimal text and stay exact: a JavaScript number would lose digits.

import { h } from "../../dom.js";

const DIGITS = 12;

/** The exact sum of decimal texts, as text without zeros at its end. */
export function addUp(texts) {
  const atoms = texts.reduce((sum, text) => sum + toAtoms(text), 0n);
  const sign = atoms < 0n ? "-" : "";
  const digits = (atoms < 0n ? -atoms : atoms).toString().padStart(DIGITS + 1, "0");
  return sign + `${digits.slice(0, -DIGITS)}.${digits.slice(-DIGITS)}`.replace(/\.?0+$/, "");
}

/** Adds up lists of {amount, currency}: one total for each currency, in the order of their codes. */
export function totalsOf(costs) {
  const byCurrency = Map.groupBy(costs.flat(), ({ currency }) => currency);
  return [...byCurrency].map(([currency, all]) => ({ currency, amount: addUp(all.map(({ amount }) => amount)) })).sort((a, b) => a.currency.localeCompare(b.currency));
}

/** `1,234.5 USD`, all digits of it. */
export function money({ amount, currency }) {
  return `${grouped(amount)} ${currency}`;
}

export function moneyList(costs) {
  return costs.length ? costs.map(money).join(", ") : "–";
}

/** The amount with commas between thousands. */
export function grouped(amount) {
  const [whole, rest] = amount.split(".");
  const commas = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return rest === undefined ? commas : `${commas}.${rest}`;
}

/** Amounts of a column, which stand with their points under each other. Returns what draws one of them. */
export function column(amounts) {
  const most = Math.max(0, ...amounts.map(decimalsOf));
  return (amount) => {
    const missing = most - decimalsOf(amount);
    const pad = missing ? (decimalsOf(amount) ? "" : ".") + "0".repeat(missing) : "";
    return h("span", { class: "amount" }, grouped(amount), pad ? h("span", { class: "pad", "aria-hidden": "true" }, pad) : null);
  };
}

function decimalsOf(amount) {
  return amount.split(".")[1]?.length ?? 0;
}

function toAtoms(text) {
  const [whole, rest = ""] = text.split(".");
  return BigInt(whole + rest.padEnd(DIGITS, "0").slice(0, DIGITS));
}
