// What a page offers to those who may not do everything. The server decides; this only spares people a refusal.

import { identity } from "../identity.js";

const READS_ONLY = "Your role reads and changes nothing.";

/** The buttons of acts, for somebody who may change something; else none. Only an operator may lack that. */
export function forChanges(...buttons) {
  return identity.mayChange ? buttons : [];
}

/** Why an operator may not send a form; null for one who may. */
export function locked() {
  return identity.mayChange ? null : READS_ONLY;
}
