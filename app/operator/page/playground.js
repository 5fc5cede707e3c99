// The playground: a chat over the server's own API, with what each answer cost.
// Owns the conversation, which is nowhere else than in this page. Text of a model goes in as text, never as HTML.

import { ask, events, Refused } from "/dashboard/server.js";

const $ = (id) => document.getElementById(id);

export function startPlayground({ say, duration, openTimeline, element }) {
  let messages = [];
  let running = null;

  async function loadModels() {
    try {
      const { data } = await (await ask("/v1/models")).json();
      const chosen = $("chat-model").value;
      $("chat-model").replaceChildren(...data.map(({ id }) => element("option", { value: id, text: id })));
      if (chosen) $("chat-model").value = chosen;
    } catch {
      // The page says already that the server cannot be reached, or wants a key; sending says it again.
    }
  }

  function bubble(role, label) {
    $("talk-empty").hidden = true;
    const text = element("div", { class: "text" });
    const cost = element("p", { class: "dim cost" });
    const node = element("article", { class: `turn ${role}`, "aria-label": label }, text, cost);
    $("talk").append(node);
    $("talk").scrollTop = $("talk").scrollHeight;
    return { node, text, cost };
  }

  function body(text) {
    const system = $("chat-system").value.trim();
    const asked = {
      model: $("chat-model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: text }],
      max_completion_tokens: Number($("chat-max").value),
      stream: true,
      stream_options: { include_usage: true },
    };
    if ($("chat-temperature").value !== "") asked.temperature = Number($("chat-temperature").value);
    if ($("chat-tokens").checked) Object.assign(asked, { logprobs: true, return_token_ids: true });
    return asked;
  }

  async function send(text) {
    const asked = body(text);
    bubble("user", "You").text.textContent = text;
    const answer = new Answer(bubble("assistant", "The model"), { duration, openTimeline, element, showTokens: Boolean(asked.return_token_ids) });
    running = answer;
    setRunning(true);
    try {
      const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(asked), signal: answer.control.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        answer.take(JSON.parse(data));
        follow();
      }
      answer.end();
      if (answer.content) messages.push({ role: "user", content: text }, { role: "assistant", content: answer.content });
      say(answer.summary());
    } catch (error) {
      answer.fail(error instanceof Refused ? error.message : "The connection was lost.");
      say("The answer failed.");
    } finally {
      running = null;
      setRunning(false);
      follow();
    }
  }

  /** Stays at the end of the conversation, unless the reader has scrolled up. */
  function follow() {
    const talk = $("talk");
    if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80) talk.scrollTop = talk.scrollHeight;
  }

  function setRunning(isRunning) {
    const hadFocus = [$("chat-send"), $("chat-stop")].includes(document.activeElement);
    $("chat-send").hidden = isRunning;
    $("chat-stop").hidden = !isRunning;
    $("chat-stop").disabled = false;
    if (hadFocus) (isRunning ? $("chat-stop") : $("chat-text")).focus();
  }

  async function stop() {
    if (!running) return;
    const answer = running;
    $("chat-stop").disabled = true;
    answer.isStopped = true;
    if (!answer.id) {
      answer.control.abort();
      return;
    }
    try {
      await ask(`/v1/chat/completions/${encodeURIComponent(answer.id)}/cancel`, { method: "POST" });
    } catch {
      answer.control.abort();
    }
  }

  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("chat-text").value.trim();
    if (!text || running) return;
    $("chat-text").value = "";
    send(text);
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("chat-form").requestSubmit();
    }
  });
  $("chat-stop").addEventListener("click", stop);
  $("chat-new").addEventListener("click", () => {
    stop();
    messages = [];
    for (const turn of $("talk").querySelectorAll(".turn")) turn.remove();
    $("talk-empty").hidden = false;
    $("chat-text").focus();
  });

  return { loadModels };
}

/** One answer as it comes in: its text, and its times as this page sees them. */
class Answer {
  constructor({ node, text, cost }, { duration, openTimeline, element, showTokens }) {
    Object.assign(this, { node, text, cost, duration, openTimeline, element, showTokens });
    this.control = new AbortController();
    this.content = "";
    this.id = "";
    this.reason = "";
    this.error = "";
    this.usage = null;
    this.numPieces = 0;
    this.isStopped = false;
    this.numTokens = 0;
    this.begunMs = performance.now();
    this.firstMs = this.lastMs = 0;
    node.classList.add("open");
    this.showCost();
  }

  take(chunk) {
    if (chunk.error) {
      if (!this.isStopped) this.error = chunk.error.message;
      return;
    }
    this.id ||= chunk.id;
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.prompt_token_ids) this.promptIds(chunk.prompt_token_ids);
    for (const choice of chunk.choices ?? []) {
      const { content, reasoning_content: thought } = choice.delta ?? {};
      if (content || thought) this.clock();
      if (thought) this.append(thought, "thought");
      if (content) {
        this.content += content;
        if (!this.showTokens) this.append(content, "");
      }
      if (this.showTokens) this.tokens(choice.token_ids ?? [], choice.logprobs?.content ?? []);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
    this.showCost();
  }

  clock() {
    this.lastMs = performance.now();
    this.firstMs ||= this.lastMs;
    this.numPieces += 1;
  }

  /** Text of another kind than before begins a new paragraph. */
  append(text, kind) {
    const last = this.text.lastElementChild;
    if (last && last.className === kind) {
      last.append(text);
    } else {
      if (last) this.text.append("\n\n");
      this.text.append(this.element("span", { class: kind, text }));
    }
  }

  /** Both lists have the same tokens. What hovering shows is in the table, too, for those who do not hover. */
  tokens(ids, list) {
    for (const [place, { token, logprob }] of list.entries()) {
      const likely = Math.exp(logprob);
      const percent = `${(likely * 100).toFixed(1)} %`;
      const node = this.element("span", { class: "token", text: token, title: `id ${ids[place]}, ${percent}, log probability ${logprob.toFixed(3)}` });
      node.dataset.likely = likely > 0.4 ? "high" : likely > 0.08 ? "middle" : "low";
      this.text.append(node);
      this.numTokens += 1;
      const cells = [[this.numTokens, "number"], [ids[place], "number mono"], [JSON.stringify(token), "mono"], [percent, "number"]];
      this.idRows().append(this.element("tr", {}, ...cells.map(([text, kind]) => this.element("td", { class: kind, text }))));
    }
  }

  promptIds(ids) {
    this.idList().append(this.element("p", {}, `Prompt, ${ids.length} tokens: `, this.element("span", { class: "mono", text: ids.join(" ") })));
  }

  /** What opens below the answer: nothing of it is there before the first id. */
  idList() {
    if (!this.list) {
      this.list = this.element("details", { class: "ids" }, this.element("summary", { text: "Token ids" }));
      this.node.append(this.list);
    }
    return this.list;
  }

  idRows() {
    if (!this.rows) {
      const names = [["Place", "number"], ["Id", "number"], ["Token", ""], ["Probability", "number"]];
      const head = this.element("tr", {}, ...names.map(([text, kind]) => this.element("th", { scope: "col", class: kind, text })));
      this.rows = this.element("tbody");
      const caption = this.element("caption", { class: "unseen", text: "Tokens of the answer" });
      // Before the prompt, which may be long.
      this.idList().firstElementChild.after(this.element("table", {}, caption, this.element("thead", {}, head), this.rows));
    }
    return this.rows;
  }

  end() {
    this.node.classList.remove("open");
    if (this.error) {
      this.fail(this.error);
      return;
    }
    if (this.isStopped) this.reason = "stopped";
    this.showCost();
  }

  fail(message) {
    this.node.classList.remove("open");
    if (this.isStopped) {
      this.reason = "stopped";
    } else {
      this.node.classList.add("failed");
      this.reason = "failed";
      this.append(message, "bad");
    }
    this.showCost();
  }

  figures() {
    const parts = [];
    const count = this.usage?.completion_tokens;
    if (this.firstMs) parts.push(`first token ${this.duration(this.firstMs - this.begunMs)}`);
    const elapsed = (this.lastMs - this.firstMs) / 1000;
    const steps = (count ?? this.numPieces) - 1;
    if (elapsed > 0.02 && steps > 0) parts.push(`${(steps / elapsed).toFixed(1)} tokens/s`);
    if (count !== undefined) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${count} tokens`, `prompt ${this.usage.prompt_tokens}, cached ${cached}`);
    }
    if (this.reason) parts.push(this.reason);
    return parts;
  }

  summary() {
    return this.error ? "The answer failed." : `Answer complete: ${this.figures().join(", ")}`;
  }

  showCost() {
    const line = this.figures().join(" · ") || "waiting";
    this.line ??= this.cost.appendChild(this.element("span"));
    this.line.textContent = line;
    if (this.id && !this.button) {
      this.button = this.element("button", { type: "button", class: "link", text: "timeline" });
      this.button.addEventListener("click", () => this.openTimeline(this.id));
      this.cost.append(" ", this.button);
    }
  }
}
