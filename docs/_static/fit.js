// Columns of text shrink until they fit; below a readable size they wrap.
(() => {
  const LEAST = 5.5;
  const fit = () => {
    for (const pre of document.querySelectorAll(".highlight-text pre")) {
      pre.style.fontSize = pre.style.whiteSpace = "";
      if (!pre.clientWidth || pre.scrollWidth <= pre.clientWidth) continue;
      const size = parseFloat(getComputedStyle(pre).fontSize) * pre.clientWidth / pre.scrollWidth * 0.97;
      pre.style.fontSize = Math.max(size, LEAST) + "px";
      if (pre.scrollWidth > pre.clientWidth) pre.style.whiteSpace = "pre-wrap";
    }
  };
  addEventListener("load", fit);
  addEventListener("resize", fit);
})();
