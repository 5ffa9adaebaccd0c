// What an alias leads to, as a short text.

import { percent } from "../../format.js";

/** `version 3`, or `90 % version 3, 10 % version 4`. */
export function targetText(target) {
  if (target === null) return "nothing";
  if ("version" in target) return `version ${target.version}`;
  const all = Object.values(target.weights).reduce((sum, weight) => sum + weight, 0);
  return Object.entries(target.weights).map(([version, weight]) => `${percent(weight / all)} version ${version}`).join(", ");
}

export const hrefOf = (name) => `#/adapters/name/${encodeURIComponent(name)}`;

/** The versions of an adapter, the newest first. */
export function newestFirst(versions) {
  return [...versions].sort((a, b) => b.version - a.version);
}
