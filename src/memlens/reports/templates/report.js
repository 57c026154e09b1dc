// Opens the table of contents on wide screens (the width is the same in report.css), opens the target of a link, draws
// the charts and exports them as files. Colors are CSS variables, so dark screens and printers need no redrawing.
const wide = window.matchMedia("(min-width: 68rem)");
const contents = document.querySelector(".toc");
contents.open = wide.matches;
wide.addEventListener("change", () => (contents.open = wide.matches));

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target?.closest("details:not([open])");
  if (!folded) return;
  folded.open = true;
  target.scrollIntoView();
}
window.addEventListener("hashchange", openTarget);

const { charts, light, width } = JSON.parse(document.getElementById("charts").textContent);
const options = {
  ast: true, // expressions are interpreted: the page forbids eval
  renderer: "svg",
  actions: false,
  defaultStyle: false,
  tooltip: { disableDefaultStyle: true },
};

for (const holder of document.querySelectorAll("[data-chart]")) {
  try {
    await window.vegaEmbed(holder, charts[holder.dataset.chart], options);
    holder.classList.add("drawn");
  } catch (error) {
    holder.textContent = "This chart could not be drawn here; its numbers are in the table below.";
    console.error(error);
  }
}

// The chart for a file, as in export_spec: fixed size, light colors, white background
async function viewOf(name) {
  const text = JSON.stringify(charts[name]).replace(/var\(--(\w+)\)/g, (_, colour) => light[colour]);
  const spec = JSON.parse(text);
  if (spec.width === "container") {
    spec.width = width;
    delete spec.autosize;
  }
  spec.config = { ...spec.config, font: "sans-serif", background: "white" };
  return (await window.vegaEmbed(document.createElement("div"), spec, options)).view;
}

for (const button of document.querySelectorAll("[data-file]")) {
  button.addEventListener("click", async () => {
    const { file, of } = button.dataset;
    const view = await viewOf(of);
    const link = document.createElement("a");
    link.download = `${of}.${file}`;
    link.href = file === "png" ? await view.toImageURL("png", 2) : `data:image/svg+xml;charset=utf-8,${encodeURIComponent(await view.toSVG())}`;
    link.click();
    view.finalize();
  });
}
openTarget();
document.documentElement.dataset.ready = "yes";
