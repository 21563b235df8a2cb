// Tables and columns of text shrink until they fit; below a readable size they wrap.
(() => {
  const shrink = (box, text, least, wrap) => {
    text.style.fontSize = "";
    wrap(false);
    if (!box.clientWidth || box.scrollWidth <= box.clientWidth) return;
    const size = parseFloat(getComputedStyle(text).fontSize) * box.clientWidth / box.scrollWidth * 0.97;
    text.style.fontSize = Math.max(size, least) + "px";
    if (box.scrollWidth > box.clientWidth) wrap(true);
  };
  const fit = () => {
    for (const pre of document.querySelectorAll(".highlight-text pre"))
      shrink(pre, pre, 5.5, (wraps) => { pre.style.whiteSpace = wraps ? "pre-wrap" : ""; });
    for (const box of document.querySelectorAll(".table-wrapper"))
      shrink(box, box.querySelector("table"), 8.5, (wraps) => box.classList.toggle("tight", wraps));
  };
  addEventListener("load", fit);
  addEventListener("resize", fit);
})();
