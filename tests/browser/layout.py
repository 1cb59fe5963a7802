"""Whether a page is laid out well, by geometry: no box or text beyond its container, no two boxes over each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTHS = (390, 768, 1024, 1280, 1920)

MISPLACED = """() => {
  const TOLERANCE = 1.5; // px
  const found = [];
  const IGNORED = "svg *, .visually-hidden, .rlaas-reader, option";
  const shown = (element) => element.checkVisibility() && !element.closest(IGNORED);
  const name = (element) => `${element.tagName}.${element.className} ${element.textContent.trim().slice(0, 60)}`;
  const isInline = (element) => getComputedStyle(element).display === "inline";
  const block = (element) => isInline(element) ? block(element.parentElement) : element;
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const content = document.querySelector("#content");
  const elements = [...content.querySelectorAll("*")].filter(shown);

  for (const element of elements) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const inScroller = element.parentElement.closest(".rlaas-scroll, .rlaas-numbers, pre");
    if ((box.left < 0 || box.right > innerWidth) && !inScroller) found.push(`outside the window: ${name(element)}`);
    const container = element.rowSpan > 1 ? element.closest("tbody") : block(element.parentElement);
    const around = container.getBoundingClientRect();
    if (!scrolls(container) && (box.left < around.left - TOLERANCE || box.right > around.right + TOLERANCE
        || box.top < around.top - TOLERANCE || box.bottom > around.bottom + TOLERANCE) && !isInline(element)) {
      found.push(`beyond its container: ${name(element)}`);
    }
    for (const node of element.childNodes) {
      if (node.nodeType !== Node.TEXT_NODE || !node.data.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const limits = block(element);
      const outer = limits.getBoundingClientRect();
      for (const line of range.getClientRects()) {
        if (!scrolls(limits) && (line.left < outer.left - TOLERANCE || line.right > outer.right + TOLERANCE)) {
          found.push(`text beyond its container: ${name(element)}`);
          break;
        }
      }
    }
    const children = [...element.children].filter(shown).map((child) => [child, [...child.getClientRects()]]);
    for (let i = 0; i < children.length; i += 1) {
      for (let j = i + 1; j < children.length; j += 1) {
        const over = children[i][1].some((a) => children[j][1].some((b) =>
          Math.min(a.right, b.right) - Math.max(a.left, b.left) > TOLERANCE
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > TOLERANCE));
        // Lines of inline boxes are higher than the line: their text does not overlap.
        if (over && !(isInline(children[i][0]) && isInline(children[j][0]))) {
          found.push(`overlapping: ${name(children[i][0])} | ${name(children[j][0])}`);
        }
      }
    }
  }
  return [...new Set(found)].slice(0, 10);
}"""


def misplaced(page: Page) -> list[str]:
    """Return what is beyond its container or over something else, in words."""
    found: list[str] = page.evaluate(MISPLACED)
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        found.append("the page scrolls sideways")
    return found
