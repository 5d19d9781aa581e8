// Collect what breaks a rule of accessibility or of narrow screens on the open page, as "rule: element".
// The rules are those of axe-core that concern this page: document-title, html-has-lang, heading-order,
// page-has-heading-one, region, landmark-one-main, svg-img-alt, empty-table-header, scope-attr-valid,
// link-name, scrollable-region-focusable, definition-list, duplicate-id and color-contrast (WCAG 2.2, AA).
const found = [];
const all = (query) => [...document.querySelectorAll(query)];
const fault = (rule, node) => found.push(`${rule}: ${node.outerHTML.slice(0, 100)}`);
const named = (node) => (node.getAttribute("aria-label") || node.textContent).trim() !== "";

function luminance(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(node) {
  let ground = node;
  while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  const style = getComputedStyle(node);
  const pair = [node.closest("svg") ? style.fill : style.color, getComputedStyle(ground).backgroundColor];
  const [low, high] = pair.map(luminance).sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

if (!document.title.trim()) found.push("title: none");
if (!/^[a-z]{2,3}(-|$)/.test(document.documentElement.lang)) found.push("lang: none");
if (all("h1").length !== 1) found.push(`h1: ${all("h1").length}`);
if (all("main").length !== 1) found.push(`main: ${all("main").length}`);
for (const node of document.body.children) if (!/^(HEADER|MAIN|FOOTER|NAV|SCRIPT)$/.test(node.tagName)) fault("region", node);
let level = 0;
for (const node of all("h1, h2, h3, h4, h5, h6")) {
  if (+node.tagName[1] > level + 1 || !named(node)) fault("heading", node);
  level = +node.tagName[1];
}
for (const node of all("svg")) if (node.getAttribute("role") !== "img" || !node.getAttribute("aria-label")) fault("svg", node);
for (const node of all("img")) if (!node.hasAttribute("alt")) fault("img", node);
for (const node of all("th")) if (!/^(col|row)$/.test(node.scope) || !named(node)) fault("th", node);
for (const node of all("a, button, summary")) if (!named(node)) fault("name", node);
for (const node of all("dl > div")) {
  if ([...node.children].map((child) => child.tagName).join() !== "DT,DD") fault("dl", node);
}
for (const node of all("[id]")) if (all(`[id="${node.id}"]`).length > 1) fault("id", node);
for (const node of all("body *")) {
  const isScroll = /auto|scroll/.test(getComputedStyle(node).overflowX);
  if (isScroll && node.scrollWidth > node.clientWidth && node.tabIndex < 0) fault("focus", node);
}
if (document.documentElement.scrollWidth > innerWidth) found.push(`width: ${document.documentElement.scrollWidth}`);
let texts = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility() || /SCRIPT|STYLE/.test(node.tagName)) continue;
  texts += 1;
  const style = getComputedStyle(node);
  const matrix = node.closest("svg") ? node.getScreenCTM() : { a: 1, b: 0 };
  const size = parseFloat(style.fontSize) * Math.hypot(matrix.a, matrix.b);
  if (size < 11) fault(`size ${size.toFixed(1)}`, node);
  const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  if (contrast(node) < (isLarge ? 3 : 4.5)) fault(`contrast ${contrast(node).toFixed(2)}`, node);
}
const seen = { width: innerWidth, texts, figures: all("svg").filter((node) => node.checkVisibility()).length };
const answer = { found, ...seen };
