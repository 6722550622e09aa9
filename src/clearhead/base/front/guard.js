"use strict";
// Runs first and alone, so that whatever goes wrong later, even a program that does not parse,
// leaves a message and not a blank page.
window.clearheadProblem = (text) => {
  const box = document.getElementById("problem");
  if (!box) return;
  box.textContent =
    `This page could not be shown in full: ${text} ` +
    "It needs a browser of 2023 or later (Chrome, Edge, Firefox or Safari).";
  box.hidden = false;
  document.documentElement.dataset.problem = "yes";
};
window.addEventListener("error", (event) => window.clearheadProblem(`${event.message}.`));
window.addEventListener("unhandledrejection", (event) => {
  window.clearheadProblem(`${(event.reason && event.reason.message) || event.reason}.`);
});
