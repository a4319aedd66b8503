// Run inside a page by test_dashboard.py: what axe does not check of structure; answers what is wrong, or nothing.
() => {
  // WCAG 2.1, 1.3.1: no level of headings is left out, and every cell stands under a heading.
  const wrong = [];
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
}
