// What every page has: how to ask the server, and whether the model is there yet.
// A site of static files (`memlens site`) has no server: there memlensSite answers, and knows the names of its files.

const site = globalThis.memlensSite;

/** An address of the workbench as it is to be used here. */
export const here = (address) => (site ? site.local(address) : address);

/** HTML of one of our own addresses, or null where the answer is something else. */
export async function askPage(address) {
  if (site) return site.askPage(address);
  const response = await fetch(address);
  const text = await response.text();
  return response.headers.get("content-type")?.startsWith("text/html") ? text : null;
}

/** Runs a script of ours that is only needed now. */
export const library = (name) => (site ? site.library(name) : import(`./${name}`));

/** JSON from one of our own addresses; an answer that is no success becomes an Error with the server's line. */
export async function ask(address, options = {}) {
  if (site) return site.ask(address);
  const response = await fetch(address, { headers: { accept: "application/json" }, ...options });
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(content.error ?? `the server answered ${response.status}`), { status: response.status });
  return content;
}

/** The same for what changes something: a JSON body, and the secret that only our pages know. */
export function tell(address, body, method = "POST") {
  const csrf = document.querySelector("meta[name=csrf]").content;
  return ask(address, {
    method,
    headers: { accept: "application/json", "content-type": "application/json", "x-memlens-csrf": csrf },
    body: JSON.stringify(body),
  });
}

/** Calls `use` once it has not been called for a while. */
export function debounced(use, milliseconds = 150) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => use(...given), milliseconds);
  };
}

/** Says something to people who listen to the page. */
export function announce(text) {
  let region = document.getElementById("announcer");
  if (!region) {
    region = Object.assign(document.createElement("p"), { id: "announcer", className: "hidden" });
    region.setAttribute("aria-live", "polite");
    document.body.append(region);
  }
  region.textContent = text;
}

// A button .copy copies its data-copy (JSON, so that no odd character stands in a page), or the <code> before it; it is shown where the browser has a clipboard.
if (navigator.clipboard) document.documentElement.classList.add("has-clipboard");
document.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy ? JSON.parse(button.dataset.copy) : button.previousElementSibling.textContent);
  announce("copied");
});

const WORDS = { none: "no model", loading: "model loading", ready: "model ready", failed: "model failed" };

/** Follows the model until it is there; pages that need it listen to "memlens:model" on the document. */
async function followModel(shown) {
  while (shown.dataset.status === "loading") {
    await new Promise((done) => setTimeout(done, 1500));
    try {
      const { status, text } = await ask("/api/status");
      shown.dataset.status = status;
      shown.textContent = WORDS[status];
      shown.title = text;
    } catch {
      return; // the server is gone; nothing to follow
    }
  }
  document.dispatchEvent(new CustomEvent("memlens:model", { detail: shown.dataset.status }));
}

const shown = document.querySelector(".model-status");
if (shown?.dataset.status === "loading") followModel(shown);
