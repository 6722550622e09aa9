"use strict";
// Unpacks the page's program and runs it: it stands in the file deflated, a third of its size. The policy of the page
// names the program by its hash, so that this can run nothing else.
(async () => {
  if (typeof DecompressionStream === "undefined") {
    window.clearheadProblem("this browser cannot unpack its data (no DecompressionStream).");
    return;
  }
  const packed = Uint8Array.from(atob(document.getElementById("program")?.textContent ?? ""), (sign) => sign.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script); // not to the body, whose last element may still be being read
})();
