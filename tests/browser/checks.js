// Run inside a page by test_dashboard.py: each function answers what is wrong, or nothing.
({
  // WCAG 2.1, 1.4.3: text holds 4.5:1 against its ground, large text 3:1.
  contrast() {
    const parse = (text) => {
      const parts = text.match(/[\d.]+/g).map(Number);
      return parts.length < 4 ? [...parts, 1] : parts;
    };
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const light = (c) => 0.2126 * linear(c[0] / 255) + 0.7152 * linear(c[1] / 255) + 0.0722 * linear(c[2] / 255);
    const ground = (node) => {
      for (let at = node; at; at = at.parentElement) {
        const colour = parse(getComputedStyle(at).backgroundColor);
        if (colour[3] > 0) return colour;
      }
      return [255, 255, 255, 1];
    };
    const poor = [];
    for (const node of document.querySelectorAll("body *")) {
      const speaks = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      if (!speaks || node.closest("svg, noscript") || !node.checkVisibility()) continue;
      const style = getComputedStyle(node), size = parseFloat(style.fontSize);
      const [dark, bright] = [light(parse(style.color)), light(ground(node))].sort((a, b) => a - b);
      const ratio = (bright + 0.05) / (dark + 0.05);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (large ? 3 : 4.5)) poor.push(`${node.outerHTML.slice(0, 90)}: ${ratio.toFixed(2)}`);
    }
    return poor;
  },

  // Every control has a name that a screen reader can say.
  nameless() {
    const controls = [...document.querySelectorAll("a, button, input:not([type=hidden]), select, textarea")];
    const named = (node) => node.textContent.trim() || node.ariaLabel || node.labels?.[0]?.textContent.trim();
    return controls.filter((node) => node.checkVisibility() && !named(node)).map((node) => node.outerHTML);
  },

  // WCAG 2.1, 4.1.1 and 1.3.1: no id twice, no level of headings left out, every cell under a heading.
  structure() {
    const wrong = [], ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    for (const id of new Set(ids.filter((each, at) => ids.indexOf(each) !== at))) wrong.push(`id ${id} twice`);
    let level = 0;
    for (const node of document.querySelectorAll("h1, h2, h3, h4")) {
      const next = Number(node.tagName[1]);
      if (next > level + 1) wrong.push(`h${level} is followed by ${node.outerHTML.slice(0, 60)}`);
      level = next;
    }
    for (const table of document.querySelectorAll("table")) {
      const heads = table.querySelectorAll("thead th[scope=col]").length;
      for (const row of table.querySelectorAll("tbody tr")) if (row.cells.length !== heads) wrong.push(`${row.cells.length} cells under ${heads} headings: ${row.innerText.slice(0, 60)}`);
    }
    return wrong;
  },

  // WCAG 2.1, 2.1.1: what scrolls by itself can be reached, and so scrolled, with the keyboard, and has a name.
  unreachable() {
    const scrolls = (node) => node.scrollWidth > node.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
    const holds = (node) => node.tabIndex >= 0 && (node.ariaLabel || node.getAttribute("aria-labelledby"));
    return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() && scrolls(node) && !holds(node)).map((node) => node.outerHTML.slice(0, 90));
  },
})
