// An answer token by token, each with the colour of its probability, and what else the model might have said there.

import { h, put, visible } from "../dom.js";

const DECODER_OPTIONS = { stream: true };

export class TokenView {
  constructor(scores) {
    this.decoder = new TextDecoder();
    this.scores = [];
    this.chosen = -1;
    this.text = h("div", {
      class: "text tokens", dir: "auto", tabindex: -1,
      on: { click: (event) => this.choose(Number(event.target.dataset.token ?? -1)), keydown: (event) => this.onKey(event) },
    });
    this.detail = h("div", { class: "alternatives", role: "status", hidden: true });
    this.element = h("div", {}, this.text, this.detail);
    this.add(scores);
  }

  /** Adds tokens with their log-probabilities, in the form of chat completions. */
  add(scores) {
    const parts = scores.map((score) => {
      const index = this.scores.push(score) - 1;
      const text = this.decoder.decode(new Uint8Array(score.bytes ?? new TextEncoder().encode(score.token)), DECODER_OPTIONS);
      return h("span", { class: `token p${level(score.logprob)}`, data: { token: index } }, visible(text));
    });
    this.text.append(...parts);
    if (this.scores.length && this.text.tabIndex !== 0) {
      this.text.tabIndex = 0;
      this.text.setAttribute("role", "group");
      this.text.setAttribute("aria-label", "Answer. The arrow keys go from token to token.");
    }
  }

  /** Adds text without log-probabilities. */
  addText(text) {
    this.text.append(document.createTextNode(visible(text)));
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.choose(-1);
    if (!step) return;
    event.preventDefault();
    this.choose(Math.min(this.scores.length - 1, Math.max(0, this.chosen + step)));
  }

  choose(index) {
    this.text.querySelector(".chosen")?.classList.remove("chosen");
    this.chosen = Number.isNaN(index) ? -1 : index;
    const score = this.scores[this.chosen];
    this.detail.hidden = !score;
    if (!score) return;
    this.text.querySelector(`[data-token="${this.chosen}"]`)?.classList.add("chosen");
    const others = (score.top_logprobs ?? []).filter((one) => one.token !== score.token);
    put(this.detail, [score, ...others].map((one) => h("span", { class: one === score ? "own" : "" }, h("bdi", { class: "mono" }, shown(one.token)), ` ${probability(one.logprob)}`)));
  }
}

function level(logprob) {
  const p = Math.exp(logprob);
  return p > 0.9 ? 4 : p > 0.6 ? 3 : p > 0.3 ? 2 : p > 0.1 ? 1 : 0;
}

function probability(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share < 1 ? share.toFixed(2) : share.toFixed(0)} %`;
}

function shown(token) {
  return visible(token).replaceAll("\n", "↵").replaceAll(" ", "␣") || "(empty)";
}
