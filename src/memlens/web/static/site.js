// A static site: gives the answers of the workbench's server from data files that are loaded on demand.
// Data files are scripts, because a page opened from a disk may run scripts of its folder but not read other files.

globalThis.memlensSite = (() => {
  const waiting = new Map(); // file -> { resolve, reject }
  const kept = new Map(); // file -> promise of its content

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  function run(file) {
    return new Promise((resolve, reject) => {
      const script = Object.assign(document.createElement("script"), { src: file, onload: resolve });
      script.onerror = () => reject(new Error(`${file} is missing from this site`));
      document.head.append(script);
    });
  }

  function data(file) {
    if (!kept.has(file)) {
      const arrives = new Promise((resolve, reject) => waiting.set(file, { resolve, reject }));
      run(`data/${file}.js`).catch((error) => waiting.get(file)?.reject(error));
      kept.set(file, arrives.then(unpacked));
    }
    return kept.get(file);
  }

  function arrived(file, text) {
    waiting.get(file)?.resolve(text);
    waiting.delete(file);
  }

  // Addresses: /m/L3N51?end=bottom is memory.html?name=L3N51&end=bottom

  function local(address) {
    const [path, query = ""] = address.split("?");
    const more = query ? `?${query}` : "";
    if (path.startsWith("/m/")) return `memory.html?name=${path.slice(3)}${query ? `&${query}` : ""}`;
    return { "/": "index.html", "/search": "search.html", "/collections": "collections.html", "/circuit": "circuit.html", "/report": "report.html" }[path] + more;
  }

  // Names: every group of memories (a layer, or an expert) has a prefix and its first row in the site's order

  async function rowOf(name) {
    const { groups } = await data("site");
    const match = /^(.*[ND])(\d+)$/i.exec(name.trim());
    const prefix = match?.[1].toUpperCase().replace(/D$/, "N");
    const group = match && groups.find((one) => one.prefix === prefix);
    if (!group) return null;
    const place = group.numbers ? group.numbers.indexOf(Number(match[2])) : Number(match[2]); // a gallery has only some
    return place >= 0 && place < group.count ? group.first + place : null;
  }

  // The map with at most `room` cells per layer. A cell of several memories shows the highest

  const column = (text, kind) => new kind(Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)).buffer);
  const packed = (numbers) => btoa(new Uint8Array(numbers.buffer).reduce((text, byte) => text + String.fromCharCode(byte), ""));

  /** Returns the memories of all layers in the order of the map: high levels first, memories without a value last. */
  async function ordered(sort, whole) {
    if (sort === "likeness") return column(await data("likeness"), Uint32Array);
    const levels = column((sort === "level" || sort === "place" ? whole : await data(`map-${sort}`)).levels, Uint8Array);
    const order = [];
    let start = 0;
    for (const { memories } of whole.layers) {
      const first = start;
      const level = (one) => (levels[first + one] === 255 ? -1 : levels[first + one]);
      const own = [...Array(memories).keys()];
      if (sort !== "place") own.sort((one, other) => level(other) - level(one) || one - other);
      for (const memory of own) order.push(memory);
      start += memories;
    }
    return order;
  }

  async function map(by, room, sort) {
    const whole = await data(`map-${by}`);
    const levels = column(whole.levels, Uint8Array);
    const order = await ordered(sort, whole);
    const layers = whole.layers.map((layer) => ({ ...layer, size: Math.max(1, Math.ceil(layer.memories / room)) }));
    const cells = [];
    const shown = [];
    let start = 0;
    for (const { memories, size } of layers) {
      for (let first = 0; first < memories; first += size) {
        let [best, memory] = [255, order[start + first]];
        for (const one of order.slice(start + first, start + Math.min(first + size, memories))) {
          const level = levels[start + one];
          if (level !== 255 && (best === 255 || level > best)) [best, memory] = [level, one];
        }
        cells.push(best);
        shown.push(memory);
      }
      start += memories;
    }
    return { ...whole, sort, layers, levels: packed(Uint8Array.from(cells)), memories: packed(Uint32Array.from(shown)) };
  }

  async function ask(address) {
    const { pathname, searchParams } = new URL(address, "http://site");
    if (pathname === "/api/map") {
      const [by, room, sort] = ["by", "room", "sort"].map((name) => searchParams.get(name));
      return map(by ?? "max", Number(room ?? 4096), sort ?? "place");
    }
    if (pathname === "/api/charts") return data("charts");
    if (pathname === "/api/circuit") return data(`circuits/${Number(searchParams.get("file"))}`);
    if (pathname.startsWith("/api/brief/")) {
      const row = await rowOf(pathname.slice(11));
      if (row === null) throw new Error("this memory does not exist");
      const line = await lineOf(row);
      return { value: null, summary: line.querySelector(".summary")?.textContent ?? "" };
    }
    throw new Error("A static site cannot compute this. Start the workbench with `memlens serve INDEX`.");
  }

  // Search: rows of a word, token or pattern, from the file for its first two letters

  // a token may have the name of an object property, such as constructor
  const own = (found, key) => (Object.hasOwn(found, key) ? found[key] : []);
  const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];

  function shard(word, count) {
    let hash = 2166136261;
    for (const byte of new TextEncoder().encode([...word].slice(0, 2).join(""))) hash = Math.imul(hash ^ byte, 16777619) >>> 0;
    return hash % count;
  }

  async function rowsOf(place, word, isLast) {
    const { shards } = await data("site");
    if (!shards[place]) throw new Error("This site does not include that.");
    const found = await data(`${place}/${shard(word, shards[place])}`);
    const lists = isLast && word.length > 1 ? Object.keys(found).filter((one) => one.startsWith(word)) : [word];
    const rows = new Map();
    for (const one of lists) {
      let row = 0;
      for (const step of own(found, one)) {
        row += step;
        if (!rows.has(row)) rows.set(row, 1);
      }
    }
    return rows;
  }

  async function tokenRows(text) {
    const { shards } = await data("site");
    if (!shards.values) throw new Error("This site does not include values.");
    const plain = text.trim();
    const found = await data(`values/${shard(plain.toLowerCase(), shards.values)}`);
    const forms = text.startsWith(" ") ? [text] : [text, ` ${text}`];
    const rows = new Map();
    for (const form of forms) {
      for (const [row, place, p] of own(found, form)) {
        const before = rows.get(row) ?? { place, p: 0 };
        rows.set(row, { place: Math.min(place, before.place), p: before.p + p });
      }
    }
    return new Map([...rows].sort(([one, left], [other, right]) => left.place - right.place || right.p - left.p || one - other));
  }

  async function matching(place, text) {
    if (place === "values") return tokenRows(text);
    if (place === "name") {
      const row = await rowOf(text);
      return new Map(row === null ? [] : [[row, null]]);
    }
    const asked = words(text);
    if (!asked.length) return new Map();
    const lists = await Promise.all(asked.map((word, number) => rowsOf(place, word, number === asked.length - 1)));
    const rows = [...lists[0].keys()].filter((row) => lists.every((list) => list.has(row)));
    return new Map(rows.sort((one, other) => one - other).map((row) => [row, null]));
  }

  function inLayers(text) {
    if (!text.trim()) return null;
    const chosen = new Set();
    for (const part of text.split(",")) {
      const match = /^\s*(\d+)(?:\s*-\s*(\d+))?\s*$/.exec(part);
      if (!match) throw new Error(`'${text}' is not a list of layers; write numbers and ranges like 0-5,11`);
      for (let layer = Number(match[1]); layer <= Number(match[2] ?? match[1]); layer++) chosen.add(layer);
    }
    return chosen;
  }

  async function filter(asked) {
    const { groups } = await data("site");
    const layers = inLayers(asked.get("layers") ?? "");
    const [kind, agreement] = [asked.get("class"), asked.get("agreement")];
    const known = kind || agreement ? await data("statistics") : null;
    const classes = kind ? column(known.categories.class, Uint8Array) : null;
    const agrees = agreement ? column(known.categories.agreement, Uint8Array) : null;
    const wanted = { none: [0], shallow: [1], semantic: [2], both: [3] }[kind];
    return (row) =>
      (!layers || groups.some((one) => row >= one.first && row < one.first + one.count && layers.has(one.layer))) &&
      (!classes || wanted.includes(classes[row])) &&
      (!agrees || agrees[row] === (agreement === "yes" ? 2 : 1));
  }

  async function byStatistic(order) {
    const known = await data("statistics");
    const numbers = column(known.numbers[order], Float32Array);
    const rows = [...numbers.keys()].filter((row) => Number.isFinite(numbers[row]));
    return new Map(rows.sort((one, other) => numbers[other] - numbers[one] || one - other).map((row) => [row, null]));
  }

  async function lineOf(row) {
    const { lines } = await data("site");
    const html = (await data(`lines/${Math.floor(row / lines)}`))[row % lines];
    return Object.assign(document.createElement("template"), { innerHTML: html }).content.firstElementChild;
  }

  async function askPage(address) {
    const asked = new URL(address, "http://site").searchParams;
    const [text, place, limit] = [asked.get("q") ?? "", asked.get("in") ?? "triggers", Number(asked.get("limit") ?? 20)];
    const holder = document.createElement("div");
    try {
      const isIn = await filter(asked);
      const named = text && (await rowOf(text));
      const rows = !text ? await byStatistic(asked.get("order") ?? "max") : named != null ? new Map([[named, null]]) : await matching(place, text);
      const found = [...rows].filter(([row]) => isIn(row));
      const shown = found.slice(0, limit);
      const summary = found.length ? `${found.length.toLocaleString("en")} ${found.length === 1 ? "memory" : "memories"}${found.length > shown.length ? `, the first ${shown.length}` : ""}` : "No memories found";
      holder.append(Object.assign(document.createElement("p"), { className: "quiet count", textContent: summary }));
      holder.firstChild.setAttribute("role", "status");
      const list = Object.assign(document.createElement("ol"), { className: "results" });
      for (const [row, hit] of shown) {
        const line = await lineOf(row);
        if (hit !== null) line.querySelector(".why").textContent = `rank ${hit.place + 1}, p ${Number((100 * hit.p).toPrecision(3))}%`;
        list.append(line);
      }
      holder.append(list);
      if (found.length > shown.length && limit < 500) {
        asked.set("limit", Math.min(500, 5 * limit));
        holder.append(Object.assign(document.createElement("a"), { className: "button", href: `search.html?${asked}`, textContent: "Show more" }));
      }
    } catch (error) {
      holder.replaceChildren(Object.assign(document.createElement("p"), { className: "note error", textContent: error.message }));
    }
    return holder.innerHTML;
  }

  // Pages

  async function showMemory(main, asked) {
    const name = asked.get("name") ?? "";
    const row = await rowOf(name);
    const { pages, model } = await data("site");
    if (row === null) {
      main.replaceChildren(Object.assign(document.createElement("h1"), { textContent: "Not found" }), Object.assign(document.createElement("p"), { textContent: `This site does not include ${name}.` }));
      return;
    }
    const found = (await data(`pages/${Math.floor(row / pages)}`))[row % pages];
    const end = asked.get("end") === "bottom" && found.length > 1 ? 1 : 0;
    main.innerHTML = found[end];
    document.title = `${main.querySelector(".memory-page").dataset.name} · ${model} · memlens`;
    await run("static/memory.js");
  }

  async function showSearch(asked) {
    const form = document.querySelector("form.search");
    for (const [name, value] of asked) {
      const field = form.elements[name];
      if (field) field.value = value;
    }
    if ([...asked].length) document.getElementById("results").innerHTML = await askPage(`/search/results?${asked}`);
    await run("static/search.js");
  }

  function begin() {
    const asked = new URLSearchParams(location.search);
    const kind = document.documentElement.dataset.site;
    const showError = (error) => document.getElementById("main").append(Object.assign(document.createElement("p"), { className: "note error", textContent: error.message }));
    if (kind === "memory") showMemory(document.getElementById("main"), asked).catch(showError);
    if (kind === "search") showSearch(asked).catch(showError);
    if (kind === "circuit") run("static/circuit.js").catch(showError);
    if (kind === "overview") {
      for (const choice of [document.getElementById("by"), document.getElementById("sort")]) {
        if ([...choice.options].some((one) => one.value === asked.get(choice.id))) choice.value = asked.get(choice.id);
      }
      run("static/overview.js").catch(showError);
    }
  }

  document.addEventListener("DOMContentLoaded", begin);
  return { arrived, ask, askPage, data, library: (name) => run(`static/${name}`), local };
})();
