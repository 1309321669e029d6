// The conversation: what was said, a reply as its tokens come, and what it took.

import { Refused, stream } from "./stream.js";
import { count, element, rate, render, seconds } from "./words.js";

const byId = (id) => document.getElementById(id);
const NEAR_END = 80;

export class Talk {
  constructor() {
    this.messages = [];
    this.model = null;
    this.living = null;
    this.said = byId("said");
    this.words = byId("words");
    this.sendButton = byId("send");
    byId("key").value = sessionStorage.getItem("key") ?? "";
    byId("key").addEventListener("change", () => sessionStorage.setItem("key", this.key));
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.living) this.living.abort();
      else this.send();
    });
    byId("anew").addEventListener("click", () => this.anew());
    this.words.addEventListener("input", () => this.fit());
    this.words.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.living) this.send();
      }
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.living?.abort());
    this.words.focus();
  }

  get key() {
    return byId("key").value.trim();
  }

  fit() {
    this.words.style.height = "auto";
    this.words.style.height = `${this.words.scrollHeight}px`;
  }

  anew() {
    this.living?.abort();
    this.messages = [];
    this.said.querySelectorAll(".turn, .wrong").forEach((one) => one.remove());
    byId("empty").hidden = false;
    this.words.focus();
  }

  /** The path and body that ask for the next reply. */
  asked() {
    const body = { model: this.model, max_tokens: Number(byId("most").value) || 512, stream: true, stream_options: { include_usage: true } };
    const temperature = byId("temperature").value;
    if (temperature !== "") body.temperature = Number(temperature);
    if (byId("mode").value === "text") return ["v1/completions", { ...body, prompt: this.messages.map((one) => one.content).join("") }];
    const system = byId("system").value.trim();
    return ["v1/chat/completions", { ...body, messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages] }];
  }

  turn(kind, text = "") {
    byId("empty").hidden = true;
    const turn = element("div", "", `turn ${kind}`);
    const words = element("div", text, "text");
    turn.append(words);
    this.said.append(turn);
    this.said.scrollTop = this.said.scrollHeight;
    return { turn, words };
  }

  async send() {
    const text = this.words.value;
    if (!text.trim()) return;
    this.words.value = "";
    this.fit();
    this.said.querySelectorAll(".wrong").forEach((one) => one.remove());
    const mine = this.turn("user", text);
    this.messages.push({ role: "user", content: text });
    const messages = this.messages;
    const reply = new Reply(this.said, this.turn("model live"));
    this.living = new AbortController();
    this.sendButton.textContent = "Stop";
    this.sendButton.classList.add("stop");
    try {
      const [path, body] = this.asked();
      for await (const event of stream(path, body, this.key, this.living.signal)) reply.take(event);
    } catch (error) {
      if (error.name !== "AbortError") this.wrong(error);
    }
    reply.end();
    if (this.messages === messages) {
      if (reply.text) messages.push({ role: "assistant", content: reply.text });
      else {
        messages.pop();
        reply.turn.remove();
        mine.turn.remove();
        if (!this.words.value) this.words.value = text;
        this.fit();
        byId("empty").hidden = messages.length > 0 || this.said.querySelector(".wrong") !== null;
      }
    }
    this.living = null;
    this.sendButton.textContent = "Send";
    this.sendButton.classList.remove("stop");
    this.words.focus();
  }

  wrong(error) {
    const wants = error instanceof Refused && error.status === 401;
    this.said.append(element("p", wants ? "This server wants a key: Options, Key." : error.message, "wrong"));
    if (wants) {
      document.querySelector(".options").open = true;
      byId("key").focus();
    }
    this.said.scrollTop = this.said.scrollHeight;
  }
}

class Reply {
  constructor(said, { turn, words }) {
    [this.said, this.turn, this.words] = [said, turn, words];
    [this.text, this.thoughts, this.usage, this.finish] = ["", "", null, null];
    [this.begun, this.first, this.last] = [performance.now(), null, null];
    this.thought = null;
  }

  take(event) {
    const atEnd = this.said.scrollHeight - this.said.scrollTop - this.said.clientHeight < NEAR_END;
    this.usage = event.usage ?? this.usage;
    for (const choice of event.choices ?? []) {
      this.finish = choice.finish_reason ?? this.finish;
      if (choice.delta?.reasoning_content) this.think(choice.delta.reasoning_content);
      const text = choice.text ?? choice.delta?.content;
      if (!text) continue;
      this.mark();
      this.text += text;
      this.words.append(element("span", text, "fresh"));
    }
    if (atEnd) this.said.scrollTop = this.said.scrollHeight;
  }

  mark() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  think(text) {
    this.mark();
    if (!this.thought) {
      this.thought = element("details", "", "thought");
      this.thought.open = true;
      this.thought.append(element("summary", "Thinking"), element("div"));
      this.turn.prepend(this.thought);
    }
    this.thoughts += text;
    this.thought.lastChild.textContent = this.thoughts;
  }

  end() {
    this.turn.classList.remove("live");
    if (this.thought) this.thought.open = !this.text;
    render(this.text, this.words);
    const told = [];
    if (this.first !== null) told.push(`first token ${seconds((this.first - this.begun) / 1e3)}`);
    const tokens = this.usage?.completion_tokens;
    if (tokens > 1 && this.last > this.first) told.push(`${count(tokens)} tokens, ${rate((tokens - 1) / ((this.last - this.first) / 1e3))} a second`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.usage) told.push(`prompt ${count(this.usage.prompt_tokens)}${cached ? `, ${count(cached)} of it restored` : ""}`);
    if (this.finish === "length") told.push("cut at the most tokens");
    if (told.length) this.turn.append(element("p", told.join("  ·  "), "told"));
  }
}
