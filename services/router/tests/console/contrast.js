// Evaluates to the texts whose contrast with their background is below 4.5 : 1, and controls without a name.
(() => {
  const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = ([red, green, blue]) => {
    const linear = [red, green, blue].map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const background = (element) => {
    for (let it = element; it !== null; it = it.parentElement) {
      const colour = channels(getComputedStyle(it).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  let checked = 0;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (texts.currentNode.textContent.trim() === "" || element.getClientRects().length === 0) continue;
    checked += 1;
    const [text, back] = [channels(getComputedStyle(element).color), background(element)].map(luminance);
    const contrast = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    if (!(contrast >= 4.5)) found.push(`${texts.currentNode.textContent.trim()}: ${contrast.toFixed(2)}`);
  }
  for (const control of document.querySelectorAll("input, select, button")) {
    const named = control.labels?.length > 0 || control.textContent.trim() !== "" || control.hidden;
    if (!named && control.closest("[hidden], dialog:not([open])") === null) found.push(`no name: ${control.outerHTML}`);
  }
  return { found, checked };
})()
