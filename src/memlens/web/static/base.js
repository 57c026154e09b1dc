// Shared by all pages: requests to the server, the state of the model, keyboard shortcuts.
// A static site (`memlens site`) has no server: memlensSite answers instead and knows the names of the files.

const site = globalThis.memlensSite;

/** Returns the address to use here for an address of the workbench. */
export const here = (address) => (site ? site.local(address) : address);

/** Returns the HTML at an address of the workbench, or null if the answer is not HTML. */
export async function askPage(address) {
  if (site) return site.askPage(address);
  const response = await fetch(address);
  const text = await response.text();
  return response.headers.get("content-type")?.startsWith("text/html") ? text : null;
}

/** Loads a script on demand. */
export const library = (name) => (site ? site.library(name) : import(`./${name}`));

/** Returns the JSON at an address of the workbench. Throws an Error with the server's message. */
export async function ask(address, options = {}) {
  if (site) return site.ask(address);
  const response = await fetch(address, { headers: { accept: "application/json" }, ...options });
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(content.error ?? `the server answered ${response.status}`), { status: response.status });
  return content;
}

/** Sends a JSON body and returns the JSON answer. */
export function tell(address, body, method = "POST") {
  return ask(address, {
    method,
    headers: { accept: "application/json", "content-type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** Returns a function that calls `use` after a pause in calls. */
export function debounced(use, milliseconds = 150) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => use(...given), milliseconds);
  };
}

/** Returns an element with these properties and children. */
export function html(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** Returns a table with one cell per content. */
export function tableOf(heads, rows) {
  const cells = (row, tag, properties) => html("tr", {}, ...row.map((content) => html(tag, properties, content)));
  return html("table", {}, html("thead", {}, cells(heads, "th", { scope: "col" })), html("tbody", {}, ...rows.map((row) => cells(row, "td", {}))));
}

/** Returns a list of tokens with bars for their probabilities. The longest bar stands for `most`. */
export function tokenBars(tokens, most = 1) {
  return html("ol", { className: "bars" }, ...tokens.map((one) => {
    const bar = html("span", { className: "bar" });
    bar.style.setProperty("--share", `${(100 * one.p) / most}%`);
    const number = html("span", { className: "n", textContent: percent(one.p), title: one.note ?? "" });
    return html("li", {}, html("span", { className: "token", textContent: one.text.replace(/^ /, "␣") || "∅" }), bar, number);
  }));
}

/** Returns a probability as a percentage. */
export const percent = (p) => `${(100 * p).toPrecision(3)}%`;

/** Announces a text to screen readers. */
export function announce(text) {
  let region = document.getElementById("announcer");
  if (!region) {
    region = html("p", { id: "announcer", className: "hidden" });
    region.setAttribute("aria-live", "polite");
    document.body.append(region);
  }
  region.textContent = text;
}

// A button .share copies the address of the page. A button .copy copies its data-copy (as JSON), or the <code> before it.
// Both are shown if the browser has a clipboard.
if (navigator.clipboard) document.documentElement.classList.add("has-clipboard");
document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy, .share");
  if (!button) return;
  const text = button.dataset.copy ? JSON.parse(button.dataset.copy) : button.previousElementSibling?.textContent;
  await navigator.clipboard.writeText(button.matches(".share") ? location.href : text);
  announce(button.matches(".share") ? "link copied" : "copied");
});

// Shortcuts

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  if (event.key === "/") {
    event.preventDefault();
    (document.getElementById("q") ?? document.getElementById("find")).focus();
  } else if (event.key === "?") {
    document.getElementById("shortcuts").showModal();
  }
});

const WORDS = { none: "no model", loading: "model loading", ready: "model ready", failed: "model failed" };

/** Polls the state of the model until it is loaded. Pages that need it listen to "memlens:model" on the document. */
async function followModel(shown) {
  while (shown.dataset.status === "loading") {
    await new Promise((done) => setTimeout(done, 1500));
    try {
      const { status, text } = await ask("/api/status");
      shown.dataset.status = status;
      shown.textContent = WORDS[status];
      shown.title = text;
    } catch {
      return; // the server has stopped
    }
  }
  document.dispatchEvent(new CustomEvent("memlens:model", { detail: shown.dataset.status }));
}

const shown = document.querySelector(".model-status");
if (shown?.dataset.status === "loading") followModel(shown);
