"use strict";
// What a model or a user wrote becomes text nodes, but for one place: `fragment` takes the HTML that markdown.py has
// made of an answer.

// ---- words -----------------------------------------------------------------------------------------------------------
const WORDS = {
  en: {
    title: "Talk to what you have grown", ask: "Ask something", send: "Send", stop: "Stop (Escape)", menu: "Chats",
    new: "New chat", remove: "Delete this chat", removing: "Delete the chat “{}”?", model: "Model", rival: "Second model",
    rename: "Rename this chat", renaming: "Name of the chat", search: "Search chats", export: "Export chats (JSON lines)",
    proceed: "Continue", down: "To the end", language: "Language", theme: "Colours", auto: "automatic", light: "light",
    dark: "dark", reset: "Reset settings", stops: "Stop strings", stopsHint: "One on each line; an answer ends before them",
    compare: "Compare", show: "Probabilities", settings: "Settings", close: "Close", copy: "Copy", copied: "Copied",
    again: "Answer again", edit: "Edit", save: "Ask this instead", cancel: "Cancel", back: "Earlier answer",
    on: "Later answer", log: "Chat", you: "You", first: "Answer 1", second: "Answer 2", writing: "The answer is being written",
    better0: "1 is better", better1: "2 is better", tie: "Tie", skip: "Skip", which: "Which answer is better?",
    vote: "Vote first, or skip.", saved: "Saved in {}", unused: "training will skip it: {}", stopped: "stopped", length: "hit max_tokens",
    broken: "The connection ended before the answer did.", away: "The server does not answer. Is it running?",
    full: "The browser's storage is full: this chat is not kept. Delete others.", tokens: "{} tokens", token: "1 token", thoughts: "Thoughts", context: "{} / {} tokens",
    dropped: "The context is full. Earlier turns left out: {}", speed: "{} tok/s",
    bars: "probability of each token", sure: "mean probability {}", key: "This server asks for its key", keyHint: "The api_key that serve.py was started with. It is kept until this tab is closed.",
    keyWrong: "That is not its key.",
    enter: "Enter", hint: "Enter sends, Shift+Enter begins a line, Escape stops. Chats stay in this browser.",
    hintTouch: "Chats stay in this browser.",
    about: "{} reads up to {} tokens. It may be wrong.",
    untuned: "{} was not tuned on conversations: it continues the text instead of answering. It reads up to {} tokens.", drawer: "Settings", part: "part of a character",
    system: "System prompt", systemHint: "What the model is told before each chat.", replaced: "What follows this turn is replaced.",
    layers: ["you are here", "sft.py, dpo.py", "pretrain.py", "tokenizer.py", "raw text"],
    explore: "Each token's probability; the alternatives are shown under the pointer, or with the arrow keys",
    examples: ["What does list.append do?", "Explain recursion to a child.", "Write a poem about rain."],
    temperature: "0: always the likeliest token; 1: as the model has it", top_p: "Only the likeliest tokens that together have this probability",
    top_k: "Only the k likeliest tokens; -1: off", min_p: "Only tokens at least this times as likely as the likeliest",
    max_tokens: "Tokens of an answer", repetition_penalty: "Above 1: tokens that stand there already are less likely",
    presence_penalty: "Above 0: less of what was said once", frequency_penalty: "Above 0: less of what was said often",
    seed: "The same seed and chat give the same answer",
  },
  zh: {
    title: "和你亲手养大的模型聊聊", ask: "问点什么", send: "发送", stop: "停止（Esc）", menu: "对话列表",
    new: "新对话", remove: "删除这个对话", removing: "删除对话“{}”？", model: "模型", rival: "第二个模型",
    rename: "重命名", renaming: "对话名称", search: "搜索对话", export: "导出对话（JSON Lines）",
    proceed: "继续", down: "到末尾", language: "语言", theme: "配色", auto: "自动", light: "浅色",
    dark: "深色", reset: "恢复默认设置", stops: "停止字符串", stopsHint: "每行一个，回答在它们之前结束",
    compare: "对比", show: "概率", settings: "设置", close: "关闭", copy: "复制", copied: "已复制",
    again: "重新回答", edit: "修改", save: "改问这个", cancel: "取消", back: "上一个回答",
    on: "下一个回答", log: "对话", you: "你", first: "回答 1", second: "回答 2", writing: "正在回答",
    better0: "1 更好", better1: "2 更好", tie: "差不多", skip: "不评", which: "哪个回答更好？",
    vote: "请先评出哪个更好，或选“不评”。", saved: "已存入 {}", unused: "训练时会跳过：{}", stopped: "已停止", length: "到长度上限截断",
    broken: "回答还没写完，连接就断了。", away: "服务器没有响应。它在运行吗？",
    full: "浏览器存储已满，这个对话没有保存。请删除一些旧对话。", tokens: "{} 个 token", token: "1 个 token", thoughts: "思考过程", context: "{} / {} token",
    dropped: "上下文已满：省略了前面 {} 轮", speed: "{} tok/s",
    bars: "每个 token 的概率", sure: "平均概率 {}", key: "请输入服务器的密钥", keyHint: "启动 serve.py 时设置的 api_key，只保留到关闭本标签页。",
    keyWrong: "密钥不对。",
    enter: "进入", hint: "Enter 发送，Shift+Enter 换行，Esc 停止。对话只保存在本浏览器里。",
    hintTouch: "对话只保存在本浏览器里。",
    about: "{} 最多能读 {} 个 token，可能会出错。",
    untuned: "{} 没有用对话微调过：它只会接着往下写，不会回答。最多能读 {} 个 token。", drawer: "设置", part: "半个字",
    system: "系统提示", systemHint: "每次对话开始前告诉模型的话。", replaced: "这一轮之后的内容会被替换。",
    layers: ["你在这里", "sft.py, dpo.py", "pretrain.py", "tokenizer.py", "原始文本"],
    explore: "每个 token 的概率；鼠标指向或用方向键查看其他候选",
    examples: ["list.append 是做什么的？", "用孩子能懂的话讲讲递归。", "写一首关于雨的诗。"],
    temperature: "0：总取最可能的 token；1：按模型的原概率", top_p: "只取累计概率达到此值的最可能 token",
    top_k: "只取最可能的 k 个 token；-1：不限", min_p: "丢弃概率低于“最高概率 × 此值”的 token",
    max_tokens: "一个回答的 token 数上限", repetition_penalty: "大于 1：已出现的 token 更难再出现",
    presence_penalty: "大于 0：说过的少说", frequency_penalty: "大于 0：说得多的少说",
    seed: "种子和对话都相同，回答就相同",
  },
};
const language = () => settings.language || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
const say = (word, ...values) => values.reduce((text, value) => text.replace("{}", () => value), WORDS[language()][word]);

// ---- nodes -----------------------------------------------------------------------------------------------------------
const at = (id) => document.getElementById(id);

/** Return a new element. properties: as in JavaScript, but "aria-..." and "data-..." are attributes. */
function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "use"));
  svg.firstChild.setAttribute("href", "#i-" + name);
  return svg;
}

/** Make a button say `word`: as text beside its icon, or to screen readers and the pointer only. */
function label(button, word, name = word, seen = false) {
  button.replaceChildren(icon(name), ...(seen ? [el("span", {}, say(word))] : []));
  button.setAttribute("aria-label", say(word));
  button.title = say(word);
  return button;
}

/** Go back to the question's field, but not on a phone, whose keyboard would cover the answer. */
const focusAsk = () => matchMedia("(pointer: fine)").matches && at("ask").focus();

const tool = (word, onclick, name = word) => label(el("button", { type: "button", className: word, onclick }), word, name);
const announce = (text) => { at("status").textContent = text; };
const rounded = (logprob) => Math.round(1000 * logprob) / 1000;
const percent = (logprob) => (100 * Math.exp(logprob)).toFixed(logprob > -4.6 ? 0 : 2) + "%";

// ---- what the browser keeps ------------------------------------------------------------------------------------------
// A key of its own for each chat: two tabs do not overwrite each other's.
const PREFIX = "groundup.chat.";
const settings = { model: "", rival: "", compare: false, show: false, system: "", stops: "", language: "",
  theme: "", params: {}, ...stored("groundup.settings") };
let models = [];  // cards of /v1/models
let chat = newChat();
let editing = -1;  // the turn that is being edited
const runs = new Map();  // id of a chat -> { chat, controller } while its answers are written
const writing = new Set();  // those answers
const views = new WeakMap();  // answer -> its element and the function that paints it

/** Return the browser's storage of this name, or, if the site may keep nothing, one for this page. */
function storageOf(name) {
  try {
    return window[name];
  } catch {
    return (storageOf[name] ??= Object.create({ getItem(key) { return this[key] ?? null; },
      setItem(key, value) { this[key] = value; }, removeItem(key) { delete this[key]; } }));
  }
}

function stored(key) {
  try {
    return JSON.parse(storageOf("localStorage").getItem(key)) ?? {};
  } catch {
    return {};  // damaged
  }
}

function keep(key, value) {
  const storage = storageOf("localStorage"), text = JSON.stringify(value);
  for (;;) {
    try {
      return storage.setItem(key, text);
    } catch {
      if (!makeRoom(key)) break;
    }
  }
  announce(say("full"));
  at("hint").textContent = say("full");
}

/** Remove the probabilities from the oldest chat that has some; return whether there was one. */
function makeRoom(key) {
  const answersOf = (one) => one.turns.flatMap((turn) => turn.answers ?? []);
  const old = keptChats().findLast((one) => PREFIX + one.id !== key && answersOf(one).some((answer) => answer.tokens.length));
  if (!old) return false;
  answersOf(old).forEach((answer) => { answer.tokens = []; });
  storageOf("localStorage").setItem(PREFIX + old.id, JSON.stringify(old));
  return true;
}

const keepSettings = () => keep("groundup.settings", settings);

function newChat() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2), time: 0, turns: [] };
}

function keepChat(one = chat, time = Date.now()) {
  one.time = time;
  keep(PREFIX + one.id, one);
  drawChats();
}

function keptChats() {
  const keys = Object.keys(storageOf("localStorage")).filter((key) => key.startsWith(PREFIX));
  return keys.map(stored).filter((one) => Array.isArray(one.turns) && one.turns.length).sort((a, b) => b.time - a.time);
}

// ---- the server ------------------------------------------------------------------------------------------------------
/** Return the server's response. Ask for the key if it wants one. Throw an Error with words for people. */
async function call(path, options = {}) {
  for (;;) {
    const key = storageOf("sessionStorage").getItem("groundup.key");
    const headers = options.body ? { "Content-Type": "application/json" } : {};
    if (key) headers.Authorization = "Bearer " + key;
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error(say("away"));
    });
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    if (response.status !== 401) {
      const error = new Error(body.error?.message ?? `${response.status} ${response.statusText}`);
      throw Object.assign(error, { code: body.error?.code });
    }
    if (key === storageOf("sessionStorage").getItem("groundup.key")) await askForKey(key);
  }
}

let asking = null;  // two answers may ask at once

function askForKey(wrong) {
  at("key").querySelector("p").textContent = say(wrong ? "keyWrong" : "keyHint");
  asking ??= new Promise((resolve, reject) => {
    const dialog = at("key");
    const input = dialog.querySelector("input");
    dialog.onclose = () => {
      asking = null;
      if (!dialog.returnValue) return reject(new Error(say("key")));
      storageOf("sessionStorage").setItem("groundup.key", input.value);
      resolve();
    };
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      dialog.close("given");
    };
    dialog.returnValue = input.value = "";
    dialog.showModal();
  });
  return asking;
}

/** Yield the objects of a stream of server-sent events. Throw if it ends before its end is said. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error(say("broken"));
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice("data: ".length));
    }
  }
}

/** Return the parameters that are set; the server knows the others. Probabilities may be wanted later. */
function asked() {
  const given = Object.entries(settings.params).filter(([, value]) => value !== "");
  const stop = settings.stops.split("\n").filter(Boolean);
  return { ...Object.fromEntries(given.map(([name, value]) => [name, Number(value)])), ...(stop.length ? { stop } : {}),
    ...(comparing() ? { tool_choice: "none" } : {}), logprobs: true, top_logprobs: 5 };
}

/** Let a model write `answer`, which is drawn as it grows. The oldest turns are left out if they do not fit. */
async function write(answer, messages, signal) {
  messages = fitting(answer, messages);
  for (;;) {
    try {
      await stream(answer, messages, signal);
    } catch (error) {
      if (error.code === "context_length_exceeded" && dropOldest(answer, messages)) continue;
      if (error.name === "AbortError") answer.finish = "stopped";
      else answer.problem = error.message;
    }
    break;
  }
  answer.finish ||= "stopped";
  paint(answer);
}

async function stream(answer, messages, signal) {
  const proceeds = messages.at(-1).role === "assistant";
  const how = { stream: true, stream_options: { include_usage: true }, continue_final_message: proceeds, add_generation_prompt: !proceeds };
  const body = JSON.stringify({ model: answer.model, messages, ...how, ...asked() });
  const bytes = new TextDecoder();  // a character may have several tokens
  const before = answer.count, nBefore = answer.tokens.length;
  let began = 0;
  for await (const event of events(await call("/v1/chat/completions", { method: "POST", body, signal }))) {
    if (event.error) throw new Error(event.error.message);
    began ||= performance.now();
    answer.fresh = event.usage?.completion_tokens ?? Math.max(0, answer.tokens.length - nBefore);  // since the seconds count
    answer.count = before + answer.fresh;
    answer.used = event.usage?.total_tokens ?? answer.used;
    for (const choice of event.choices) grow(answer, choice, bytes);
    answer.seconds = (performance.now() - began) / 1000;
    paintSoon(answer);
  }
}

const contextOf = (name) => models.find((one) => one.id === name)?.max_model_len ?? Infinity;

/** Return the messages that leave a quarter of the context for the answer, by the tokens of the last one. */
function fitting(answer, messages) {
  messages = [...messages];
  const size = () => messages.reduce((sum, message) => sum + message.content.length, 0);
  const last = messages.length > 1 && chat.turns.findLast((turn) => turn.answers && chosen(turn).used);
  const perCharacter = last ? chosen(last).used / Math.max(1, size()) : 0;  // the last question is new: a little low
  while (perCharacter * size() > 0.75 * contextOf(answer.model) && dropOldest(answer, messages));
  return messages;
}

/** Remove the oldest question with its answer, unless it is the only one. */
function dropOldest(answer, messages) {
  const first = messages.findIndex((message) => message.role === "user");
  const next = messages.findIndex((message, i) => i > first && message.role === "user");
  if (next < 0) return false;
  messages.splice(first, next - first);
  answer.dropped = (answer.dropped ?? 0) + 1;
  return true;
}

function grow(answer, choice, bytes) {
  if (choice.delta.turns) {  // what was said so far is part of a turn that called tools
    const turns = choice.delta.turns.map(({ index, ...turn }) => turn);
    Object.assign(answer, { turns: [...(answer.turns ?? []), ...turns], text: "", thoughts: "", tokens: [] });
    rendered.delete(answer);
    draw();
  }
  answer.text += choice.delta.content ?? "";
  answer.thoughts = (answer.thoughts ?? "") + (choice.delta.reasoning_content ?? "");
  answer.finish = choice.finish_reason ?? answer.finish;
  for (const one of choice.logprobs?.content ?? []) {
    const others = one.top_logprobs.map((other) => [other.token, rounded(other.logprob)]);
    const text = bytes.decode(new Uint8Array(one.bytes), { stream: true });
    answer.tokens.push({ text, own: one.token, p: rounded(one.logprob), others });
  }
}

// ---- a chat ----------------------------------------------------------------------------------------------------------
const chosen = (turn) => turn.answers[turn.pair ? (turn.better === 1 ? 1 : 0) : turn.at];
const isOpen = (turn) => Boolean(turn?.pair) && turn.better === null;

function messagesBefore(index, prompt = settings.system, one = chat) {
  const system = prompt.trim() ? [{ role: "system", content: prompt }] : [];
  const said = one.turns.slice(0, index).flatMap((turn) => turn.answers
    ? [...(chosen(turn).turns ?? []), { role: "assistant", content: chosen(turn).text }] : [{ role: "user", content: turn.text }]);
  return [...system, ...said];
}

function send() {
  const text = at("ask").value;
  if (runs.has(chat.id) || !text.trim()) return;
  if (isOpen(chat.turns.at(-1))) {
    chat.turns.at(-1).problem = say("vote");
    draw();
    document.querySelector(".vote button").focus();
    return announce(say("vote"));
  }
  at("ask").value = "";
  chat.turns.push({ text });
  answerTo(chat.turns.length - 1);
}

/** Write an answer to the turn at `index`, with which the chat ends but for earlier answers to it. */
function answerTo(index) {
  const blank = (model) => ({ model, text: "", tokens: [], finish: "", count: 0, seconds: 0 });
  const earlier = chat.turns[index + 1];
  chat.turns.length = index + 1;
  let written = [blank(settings.model)];
  if (comparing()) {
    written.push(blank(settings.rival));
    if (Math.random() < 0.5) written.reverse();
    chat.turns.push({ pair: true, answers: written, better: null, system: settings.system });
  } else {
    const answers = [...(earlier && !earlier.pair ? earlier.answers : []), ...written];
    chat.turns.push({ answers, at: answers.length - 1 });
  }
  run(written, messagesBefore(index + 1));
}

/** Go on with an answer that was cut. */
function proceed(index) {
  const answer = chosen(chat.turns[index]);
  Object.assign(answer, { finish: "", problem: "" });
  rendered.delete(answer);  // its last block may grow
  run([answer], messagesBefore(index + 1));
}

async function run(answers, messages) {
  const of = chat;  // another may be open when this ends
  const controller = new AbortController();
  runs.set(of.id, { chat: of, controller });
  answers.forEach((answer) => writing.add(answer));
  of.system = settings.system;
  keepChat();
  draw();
  announce(say("writing"));
  follow();
  await Promise.all(answers.map((answer) => write(answer, messages, controller.signal)));
  runs.delete(of.id);
  answers.forEach((answer) => writing.delete(answer));
  if (storageOf("localStorage").getItem(PREFIX + of.id)) keepChat(of);  // it may have been deleted
  drawChats();
  if (chat !== of) return;
  announce(answers.map((answer) => answer.problem ?? answer.text).join("\n"));
  draw();
}

function stop(id = chat.id) {
  runs.get(id)?.controller.abort();
}

/** Keep which of the two answers is better, and show whose they are. */
async function vote(turn, better) {
  const index = chat.turns.indexOf(turn);
  const answers = turn.answers.map((answer) => ({ model: answer.model, content: answer.text,
    finish_reason: answer.finish === "stopped" ? "length" : answer.finish }));
  try {
    if (better !== "skip") {
      const body = JSON.stringify({ messages: messagesBefore(index, turn.system), answers, better });
      const saved = await (await call("/v1/preferences", { method: "POST", body })).json();
      Object.assign(turn, { saved: saved.path, unused: saved.unused });
    }
    turn.better = better;
    turn.problem = "";
  } catch (error) {
    turn.problem = error.message;
  }
  keepChat();
  draw();
  focusAsk();
}

function edit(index, text) {
  editing = -1;
  if (text === null || !text.trim()) return draw();
  chat.turns.length = index + 1;
  chat.turns[index] = { text };
  answerTo(index);
  focusAsk();
}

/** Show another chat. What is being written goes on. */
function open(other) {
  chat = runs.get(other.id)?.chat ?? other;
  editing = -1;
  openSide(false);
  draw();
  drawChats();
  focusAsk();
}

function remove(other) {
  if (!confirm(say("removing", titleOf(other)))) return;
  stop(other.id);
  storageOf("localStorage").removeItem(PREFIX + other.id);
  if (other.id === chat.id) return open(newChat());
  drawChats();
}

function rename(other) {
  const title = prompt(say("renaming"), titleOf(other))?.trim();
  const one = other.id === chat.id ? chat : runs.get(other.id)?.chat ?? other;
  if (title) keepChat(Object.assign(one, { title }), one.time);
}

/** Save the chats of the list as conversations that prepare.py --kind=chat reads. */
function exportChats() {
  const lines = foundChats().map((one) => JSON.stringify({ messages: messagesBefore(one.turns.length, one.system ?? "", one) }) + "\n");
  const href = URL.createObjectURL(new Blob(lines, { type: "application/jsonl" }));
  el("a", { href, download: "chats.jsonl" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

// ---- drawing ---------------------------------------------------------------------------------------------------------
const titleOf = (one) => one.title ?? one.turns[0].text.trim().slice(0, 60);
const comparing = () => settings.compare && models.length > 1;

const isAtEnd = () => at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 80;

/** Scroll to the end, but not past the beginning of two answers that are compared. */
function follow() {
  const log = at("log"), last = at("turns").lastElementChild;
  const top = last?.className === "pair" ? last.getBoundingClientRect().top - log.getBoundingClientRect().top + log.scrollTop : Infinity;
  log.scrollTop = Math.min(log.scrollHeight, top);
}

function draw() {
  const empty = !chat.turns.length, follows = isAtEnd();
  document.body.classList.toggle("grounded", empty);
  at("empty").hidden = at("strata").hidden = !empty;
  const turns = chat.turns.map((turn, index) => (turn.answers ? drawAnswers : drawQuestion)(turn, index));
  at("turns").replaceChildren(...turns);
  label(at("send"), runs.has(chat.id) ? "stop" : "send");
  drawContext();
  at("rival").hidden = at("versus").hidden = !comparing();
  at("compare").setAttribute("aria-pressed", comparing());
  at("show").setAttribute("aria-pressed", settings.show);
  const card = models.find((one) => one.id === settings.model);
  if (card) at("about").textContent = say(card.tuned ? "about" : "untuned", card.id, card.max_model_len);
  const examples = card?.examples?.length ? card.examples : WORDS[language()].examples;
  at("examples").replaceChildren(...examples.map((text) =>
    el("button", { textContent: text, onclick: () => { at("ask").value = text; send(); } })));
  if (follows) follow();
}

/** Say how much of the context the chat takes. */
function drawContext() {
  const last = chat.turns.findLast((turn) => turn.answers && chosen(turn).used);
  const answer = last && chosen(last);
  at("context").textContent = answer && isFinite(contextOf(answer.model)) ? say("context", answer.used, contextOf(answer.model)) : "";
}

/** Return the chats in which the searched words are. */
function foundChats() {
  const words = at("search").value.trim().toLowerCase();
  const textOf = (one) => [titleOf(one), ...one.turns.map((turn) => turn.text ?? chosen(turn).text)].join("\n").toLowerCase();
  return keptChats().filter((one) => !words || textOf(one).includes(words));
}

function drawChats() {
  const found = foundChats();
  at("chats").replaceChildren(...found.map((one) => {
    const title = titleOf(one);
    const button = el("button", { textContent: title, title, onclick: () => open(one) });
    if (one.id === chat.id) button.setAttribute("aria-current", "true");
    button.classList.toggle("writing", runs.has(one.id));
    const tools = el("span", { className: "chat-tools" }, tool("rename", () => rename(one), "edit"), tool("remove", () => remove(one)));
    return el("li", {}, button, tools);
  }));
  at("export").disabled = !found.length;
}

function drawQuestion(turn, index) {
  const said = el("div", { className: "said", textContent: turn.text });
  const begin = tool("edit", () => { editing = index; draw(); });
  const tools = el("div", { className: "tools" }, tool("copy", copy(() => turn.text)), begin);
  begin.disabled = runs.has(chat.id);
  const item = el("li", { className: "question" }, el("span", { className: "unseen" }, say("you")), said, tools);
  if (editing === index && !runs.has(chat.id)) item.replaceChildren(...editor(turn, index));
  return item;
}

function editor(turn, index) {
  const area = el("textarea", { value: turn.text, rows: 3, "aria-label": say("edit") });
  area.onkeydown = (event) => {
    if (sends(event)) edit(index, area.value);
    if (event.key === "Escape") edit(index, null);
  };
  const save = el("button", { className: "main-button save", textContent: say("save"), onclick: () => edit(index, area.value) });
  const cancel = el("button", { textContent: say("cancel"), onclick: () => edit(index, null) });
  requestAnimationFrame(() => area.focus());
  return [area, el("div", { className: "tools" }, el("small", {}, say("replaced")), save, cancel)];
}

function drawAnswers(turn, index) {
  const shown = turn.pair ? turn.answers : [chosen(turn)];
  const item = el("li", { className: turn.pair ? "pair" : "" }, el("div", { className: "answers" }, ...shown.map((answer, i) => {
    const name = isOpen(turn) ? say(i ? "second" : "first") : answer.model;
    const node = el("article", { className: "answer" }, el("div", { className: "by" }, name));
    node.classList.toggle("better", turn.pair && turn.better === i);
    const facts = el("span", { className: "facts" });
    const paintBody = drawBody(answer, node);
    node.append(drawTools(turn, index, answer, facts));
    views.set(answer, () => { paintBody(); facts.textContent = factsOf(answer).join(" · "); });
    views.get(answer)();
    render(answer);
    return node;
  })));
  if (isOpen(turn) && !turn.answers.some((answer) => writing.has(answer))) item.append(drawVote(turn));
  if (turn.saved) {
    const unused = turn.unused === "tie" ? say("tie") : turn.unused && say("unused", turn.unused);
    item.append(el("p", { className: "hint" }, say("saved", turn.saved) + (unused ? " · " + unused : "")));
  }
  return item;
}

function drawTools(turn, index, answer, facts) {
  const tools = el("div", { className: "tools" }, tool("copy", copy(() => answer.text)));
  const isLast = index === chat.turns.length - 1 && !runs.has(chat.id);
  if (isLast && !(turn.pair && answer === turn.answers[0])) tools.append(tool("again", () => answerTo(index - 1)));
  if (isLast && !turn.pair && answer.text && ["length", "stopped"].includes(answer.finish)) {
    tools.append(label(el("button", { type: "button", className: "proceed", onclick: () => proceed(index) }), "proceed", "on", true));
  }
  if (isLast && !turn.pair && turn.answers.length > 1) {
    const go = (step) => () => { turn.at = (turn.at + step + turn.answers.length) % turn.answers.length; keepChat(); draw(); };
    tools.append(tool("back", go(-1)), `${turn.at + 1}/${turn.answers.length}`, tool("on", go(1)));
  }
  tools.append(facts);
  return tools;
}

function drawVote(turn) {
  const choices = [["better0", 0], ["tie", "tie"], ["better1", 1], ["skip", "skip"]];
  const buttons = choices.map(([word, better]) => el("button", { textContent: say(word), onclick: () => vote(turn, better) }));
  const problem = turn.problem ? el("p", { className: "problem", role: "alert" }, turn.problem) : null;
  const group = { className: "vote", role: "group", "aria-label": say("which") };
  return el("div", group, el("p", {}, say("which")), problem, ...buttons);
}

const waiting = new Set();
const opened = new WeakSet();  // answers whose thoughts are read

/** Draw an answer before the next frame, once, however many tokens have come. */
function paintSoon(answer) {
  if (!waiting.size) requestAnimationFrame(() => { waiting.forEach(paint); waiting.clear(); });
  waiting.add(answer);
}

function paint(answer) {
  const follows = isAtEnd();
  views.get(answer)?.();
  if (follows) follow();
  at("down").hidden = isAtEnd();
  render(answer);
}

/** Add the parts of an answer to `node`. Return a function that brings them up to date: what is there already stays. */
function drawBody(answer, node) {
  const dropped = el("p", { className: "hint" });
  const thoughts = el("details", { hidden: true }, el("summary", {}, say("thoughts")), el("div"));
  const asTokens = settings.show && (answer.tokens.length > 0 || writing.has(answer));
  thoughts.open = opened.has(answer);
  thoughts.ontoggle = () => (thoughts.open ? opened.add(answer) : opened.delete(answer));
  const calls = (answer.turns ?? []).map(({ role, content }) => el("pre", { className: "call",
    textContent: role === "tool" ? "\u2192 " + content : content.replace(/<tool_call>\n|\n<\/tool_call>/g, "") }));
  const [parts, paintText] = asTokens ? drawTokens(answer) : drawText(answer);
  const problem = el("div", { className: "problem", role: "alert" });
  node.append(thoughts, ...calls, ...parts);
  return () => {
    if (answer.dropped) thoughts.before(dropped);
    if (answer.problem) parts.at(-1).after(problem);
    dropped.textContent = say("dropped", answer.dropped);
    thoughts.hidden = !answer.thoughts;
    if (answer.thoughts) thoughts.lastChild.textContent = answer.thoughts.trim();
    paintText();
    parts[0].classList.toggle("writing", writing.has(answer) && !answer.finish);
    problem.textContent = answer.problem ?? "";
  };
}

/** Draw an answer as text: the blocks that are rendered, and behind them the rest as it is. */
function drawText(answer) {
  const rest = el("div", { className: "rest" }), node = el("div", { className: "text" }, rest);
  let n = 0;
  return [[node], () => {
    const { pieces, taken } = renderedOf(answer);
    for (; n < pieces.length; n++) rest.before(fragment(pieces[n]));
    rest.textContent = answer.text.slice(taken).replace(/^\n+/, "");
  }];
}

// ---- Markdown, which the server renders ------------------------------------------------------------------------------
const RENDER_MS = 200;  // between two requests while an answer is written
const rendered = new WeakMap();  // answer -> { pieces of HTML, characters of its text taken into them, ... }
const policy = window.trustedTypes?.createPolicy("groundup", { createHTML: (html) => html });

function renderedOf(answer) {
  if (!rendered.has(answer)) rendered.set(answer, { pieces: [], taken: 0, asking: false, seen: 0, next: 0 });
  return rendered.get(answer);
}

/** Let the server render the blocks that have ended, or all of an answer that has. */
async function render(answer) {
  const state = renderedOf(answer), whole = !writing.has(answer) || Boolean(answer.finish), end = answer.text.length;
  if (state.asking || state.seen === (whole ? end + 1 : end) || (settings.show && answer.tokens.length)) return;
  if (!whole && (performance.now() < state.next || !answer.text.slice(state.seen).includes("\n"))) return;
  Object.assign(state, { asking: true, seen: whole ? end + 1 : end, next: performance.now() + RENDER_MS });
  const text = answer.text.slice(state.taken);
  try {
    const body = JSON.stringify({ text, whole });
    const { html, rest } = await (await call("/v1/render", { method: "POST", body })).json();
    if (html) state.pieces.push(html);
    state.taken += text.length - rest.length;
  } catch {
    // It stays as it is.
  }
  state.asking = false;
  if (rendered.get(answer) === state) paint(answer);
}

/** Return the nodes of HTML that the server has made and cleaned (markdown.py). */
function fragment(html) {
  const box = el("template");
  box.innerHTML = policy ? policy.createHTML(html) : html;
  for (const pre of box.content.querySelectorAll("pre")) {
    const code = pre.firstElementChild, language = code?.className.replace("language-", "");
    const head = el("div", {}, el("span", {}, language || "text"), tool("copy", copy(() => pre.textContent.replace(/\n$/, ""))));
    const frame = el("div", { className: "code" }, head);
    pre.replaceWith(frame);
    pre.tabIndex = 0;
    frame.append(pre);
  }
  return box.content;
}

// ---- probabilities ---------------------------------------------------------------------------------------------------
function factsOf(answer) {
  const ended = !writing.has(answer) || answer.finish;
  const facts = ended && ["length", "stopped"].includes(answer.finish) ? [say(answer.finish)] : [];
  if (answer.count) facts.push(answer.count === 1 ? say("token") : say("tokens", answer.count));
  if (answer.fresh > 1 && answer.seconds > 0.05) facts.push(say("speed", ((answer.fresh - 1) / answer.seconds).toFixed(0)));
  if (settings.show && answer.tokens.length) {
    const sum = answer.tokens.reduce((sum, token) => sum + Math.exp(token.p), 0);
    facts.push(say("sure", (100 * sum / answer.tokens.length).toFixed(0) + "%"));
  }
  return facts;
}

/** Draw an answer as tokens with their probabilities, and a core sample of it: a bar for each token. */
function drawTokens(answer) {
  const text = el("div", { className: "text tokens", tabIndex: 0, role: "group", "aria-label": say("explore") });
  const core = el("div", { className: "core", title: say("bars"), "aria-hidden": "true" });
  const add = (part, name, token, i) => {
    const node = el(name, { "data-i": i, textContent: name === "span" ? token.text : "" });
    node.style.setProperty("--p", Math.exp(token.p));  // by script: the headers allow no style attributes
    part.append(node);
  };
  for (const part of [text, core]) {
    part.onpointerover = (event) => event.target.dataset.i && point(answer, text, core, Number(event.target.dataset.i));
    part.onpointerleave = text.onblur = () => unpoint();
  }
  text.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const here = Number(text.querySelector(".here")?.dataset.i ?? -1) + step;
    point(answer, text, core, Math.min(Math.max(here, 0), text.children.length - 1));
  };
  return [[text, core, el("small", { className: "caption" }, say("bars"))], () => {
    for (let i = text.children.length; i < answer.tokens.length; i++) {
      add(text, "span", answer.tokens[i], i);
      add(core, "i", answer.tokens[i], i);
    }
  }];
}

/** Show what else could have stood at token `i`. */
function point(answer, text, core, i) {
  unpoint();
  const token = answer.tokens[i];
  const isChosen = ([own, p]) => own === token.own && p === token.p;
  const others = token.others.some(isChosen) ? token.others : [[token.own, token.p], ...token.others];
  const rows = others.map(([own, p]) => {
    const row = el("div", {}, el("code", {}, visible(own)), el("b"), el("span", {}, percent(p)));
    row.classList.toggle("chosen", isChosen([own, p]));
    row.children[1].style.setProperty("--p", Math.exp(p));
    return row;
  });
  const box = at("alternatives"), span = text.children[i], place = span.getBoundingClientRect();
  span.classList.add("here");
  core.children[i].classList.add("here");
  box.replaceChildren(...rows);
  box.hidden = false;
  const above = place.bottom + box.offsetHeight + 12 > innerHeight;
  box.style.left = Math.max(8, Math.min(place.left, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = (above ? Math.max(8, place.top - box.offsetHeight - 8) : place.bottom + 8) + "px";
  if (document.activeElement === text) announce(others.map(([own, p]) => `${visible(own)} ${percent(p)}`).join(", "));
}

function unpoint() {
  at("alternatives").hidden = true;
  document.querySelectorAll(".here").forEach((node) => node.classList.remove("here"));
}

function visible(text) {
  if (text.includes("\ufffd")) return say("part");
  return text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
}

// ---- controls --------------------------------------------------------------------------------------------------------
const PARAMS = [["temperature", 0, 2, 0.05], ["top_p", 0, 1, 0.01], ["top_k", -1, 1e6, 1], ["min_p", 0, 1, 0.01],
  ["max_tokens", 1, 1e6, 1], ["repetition_penalty", 0.01, 10, 0.05], ["presence_penalty", -2, 2, 0.1],
  ["frequency_penalty", -2, 2, 0.1], ["seed", 0, Number.MAX_SAFE_INTEGER, 1]];

/** Return an event handler that copies. Pages of other machines without https have no clipboard but this old command. */
function copy(text) {
  return async (event) => {
    const button = event.currentTarget;
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      const area = document.body.appendChild(el("textarea", { value: text(), className: "unseen" }));
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    announce(say("copied"));
    button.title = say("copied");
  };
}

/** Return whether a key sends what is written. Enter also ends a word that an input method composes, as for Chinese. */
function sends(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return false;
  event.preventDefault();
  return true;
}

/** Show or hide the list of chats, on a phone. */
function openSide(shown) {
  at("side").classList.toggle("open", shown);
  at("menu").setAttribute("aria-expanded", shown);
}

function fitAsk() {
  at("ask").style.height = "auto";
  at("ask").style.height = at("ask").scrollHeight + "px";
}

function drawDrawer() {
  const area = (name, rows, word, hint) => {
    const input = el("textarea", { id: name, rows, value: settings[name] });
    input.oninput = () => { settings[name] = input.value; keepSettings(); };
    return el("div", { className: "field wide" }, el("label", { htmlFor: name }, say(word)), input, el("small", {}, say(hint)));
  };
  const choice = (name, options) => {
    const input = el("select", { id: name }, ...options.map(([value, text]) => el("option", { value }, text)));
    input.value = settings[name];
    input.onchange = () => { settings[name] = input.value; keepSettings(); sayEverything(); draw(); drawDrawer(); at(name).focus(); };
    return el("div", { className: "field" }, el("label", { htmlFor: name }, say(name)), input);
  };
  const fields = PARAMS.map(([name, min, max, step]) => {
    const input = el("input", { id: name, type: "number", min, max, step, value: settings.params[name] ?? "" });
    input.placeholder = models[0]?.defaults[name === "max_tokens" ? "max_new_tokens" : name] ?? (name === "seed" ? "" : 0);
    input.setAttribute("aria-describedby", name + "-hint");
    input.oninput = () => { settings.params[name] = input.value; keepSettings(); };
    const hint = el("small", { id: name + "-hint" }, say(name));
    return el("div", { className: "field" }, el("label", { htmlFor: name }, name), input, hint);
  });
  const reset = el("button", { id: "reset", textContent: say("reset") });
  reset.onclick = () => {
    Object.assign(settings, { system: "", stops: "", params: {}, language: "", theme: "" });
    keepSettings();
    sayEverything();
    draw();
    drawDrawer();
  };
  at("fields").replaceChildren(area("system", 4, "system", "systemHint"), ...fields, area("stops", 2, "stops", "stopsHint"),
    choice("language", [["", say("auto")], ["en", "English"], ["zh", "中文"]]),
    choice("theme", [["", say("auto")], ["light", say("light")], ["dark", say("dark")]]), reset);
}

function drawModels() {
  for (const [id, other] of [["model", 0], ["rival", 1]]) {
    at(id).replaceChildren(...models.map((card) => el("option", { value: card.id }, card.id)));
    if (!models.some((card) => card.id === settings[id])) settings[id] = models[other % models.length].id;
    at(id).value = settings[id];
    at(id).onchange = () => { settings[id] = at(id).value; differ(id); keepSettings(); draw(); };
  }
  at("compare").hidden = models.length < 2;
  differ("model");
}

/** Change the other model if both are the same: nobody can compare a model with itself. */
function differ(id) {
  const other = id === "model" ? "rival" : "model";
  if (settings.model !== settings.rival || models.length < 2) return;
  settings[other] = models.find((card) => card.id !== settings[id]).id;
  at(other).value = settings[other];
}

function sayEverything() {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  document.documentElement.dataset.theme = settings.theme;
  for (const id of ["menu", "settings", "close", "down"]) label(at(id), id, id === "close" ? "remove" : id);
  for (const id of ["new", "compare", "show"]) label(at(id), id, id, true);
  for (const id of ["model", "rival", "ask", "search"]) at(id).setAttribute("aria-label", say(id));
  at("nav").setAttribute("aria-label", say("menu"));
  at("log").setAttribute("aria-label", say("log"));
  at("ask").placeholder = say("ask");
  at("search").placeholder = say("search");
  at("export").textContent = say("export");
  at("hint").textContent = say(matchMedia("(pointer: coarse)").matches ? "hintTouch" : "hint");
  at("empty").querySelector("h1").textContent = say("title");
  at("drawer-title").textContent = say("drawer");
  at("key-title").textContent = say("key");
  at("key").querySelector("input").setAttribute("aria-label", say("key"));
  at("key").querySelector("button").textContent = say("enter");
  at("strata").replaceChildren(...WORDS[language()].layers.map((layer) => el("li", {}, layer)));
  drawChats();
}

function listen() {
  at("composer").onsubmit = (event) => { event.preventDefault(); runs.has(chat.id) ? stop() : send(); fitAsk(); };
  at("ask").oninput = fitAsk;
  at("ask").onkeydown = (event) => { if (sends(event)) { send(); fitAsk(); } };
  at("new").onclick = () => open(newChat());
  at("menu").onclick = () => openSide(!at("side").classList.contains("open"));
  at("search").oninput = drawChats;
  at("export").onclick = exportChats;
  at("log").onclick = () => openSide(false);
  at("log").onscroll = () => { at("down").hidden = isAtEnd(); };
  at("down").onclick = () => { at("log").scrollTop = at("log").scrollHeight; };
  at("compare").onclick = () => { settings.compare = !settings.compare; keepSettings(); draw(); };
  at("show").onclick = () => { settings.show = !settings.show; unpoint(); keepSettings(); draw(); };
  at("settings").onclick = () => { unpoint(); drawDrawer(); at("drawer").showModal(); };
  at("close").onclick = () => at("drawer").close();
  at("drawer").onclick = (event) => { if (event.target === at("drawer")) at("drawer").close(); };  // beside it
  document.onkeydown = (event) => {
    if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
    unpoint();
    openSide(false);
    stop();
  };
  window.onpagehide = () => runs.forEach((one) => keepChat(one.chat));
  window.onstorage = drawChats;  // another tab
}

async function start() {
  chat = keptChats()[0] ?? chat;
  sayEverything();
  listen();
  draw();
  try {
    models = (await (await call("/v1/models")).json()).data;
    drawModels();
  } catch (error) {
    at("about").textContent = error.message;
  }
  draw();
}

start();
