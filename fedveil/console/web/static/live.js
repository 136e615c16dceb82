// A page that has changed is fetched again and replaces the old one. Nothing is rendered here.
"use strict";
(() => {
  const main = document.getElementById("main");
  const word = document.getElementById("live");
  const hold = document.getElementById("hold");
  const at = document.getElementById("at");
  let held = false, missed = false, busy = false, broken = false;

  function say(text) {
    if (word.textContent !== text) word.textContent = text;
  }

  const inside = () => [...main.querySelectorAll("a, summary, button, input, select, [tabindex]")];
  const fields = () => [...main.querySelectorAll("input, select")];
  const isTyped = (one) => one.matches("select, input[type=search]");

  function replace(fresh) {
    const open = new Set([...main.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
    const focus = inside().indexOf(document.activeElement);
    const ticked = new Map(fields().filter((one) => one.type === "checkbox").map((one) => [one.value, one.checked]));
    const typed = new Map(fields().filter(isTyped).map((one) => [one.name, one.value]));
    const moved = [...main.querySelectorAll(".wide")].map((one) => one.scrollLeft);
    main.replaceChildren(...fresh.childNodes);
    count();
    offer();
    for (const one of fields()) {
      if (one.type === "checkbox" && ticked.has(one.value)) one.checked = ticked.get(one.value);
      else if (isTyped(one) && typed.has(one.name)) one.value = typed.get(one.name);
    }
    main.dataset.state = fresh.dataset.state;
    for (const one of main.querySelectorAll("details > summary")) one.parentElement.open = open.has(one.textContent);
    [...main.querySelectorAll(".wide")].forEach((one, i) => { one.scrollLeft = moved[i] || 0; });
    if (focus >= 0 && inside()[focus]) inside()[focus].focus({ preventScroll: true });
  }

  // The seconds of a current round: counted on from their value when this part of the page was loaded.
  const began = new WeakMap();
  function count() {
    for (const one of main.querySelectorAll("[data-step]")) {
      if (!began.has(one)) began.set(one, [Number(one.textContent), performance.now()]);
      const [from, at] = began.get(one);
      const past = Math.floor((performance.now() - at) / 1000);
      if (!held && !broken) one.textContent = Math.max(0, from + Number(one.dataset.step) * past);
    }
  }

  // A command's button, which is hidden without this script.
  function offer() {
    for (const one of main.querySelectorAll(".command button")) one.hidden = !navigator.clipboard;
  }
  main.addEventListener("click", async (event) => {
    if (!event.target.matches(".command button")) return;
    try {
      await navigator.clipboard.writeText(event.target.previousElementSibling.textContent);
      event.target.textContent = "Copied";
    } catch (error) {
      event.target.textContent = "Select it by hand";
    }
  });

  // A list that is open, or a text that is being typed, is not replaced below the reader's hands.
  const isTyping = () => document.activeElement.matches("main select, main input[type=search]");
  main.addEventListener("focusout", () => setTimeout(() => { if (missed && !isTyping()) refresh(); }, 200));

  async function refresh() {
    if (held || busy || isTyping()) { missed = true; return; }
    busy = true;
    missed = false;
    try {
      const answer = await fetch(location.pathname + location.search, { cache: "no-store", credentials: "same-origin" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById("main");
      if (fresh) { replace(fresh); at.textContent = page.getElementById("at").textContent; } else say("ended: open the link that fedveil printed");
    } catch (error) {
      say("the dashboard is not responding");
    } finally {
      busy = false;
    }
    if (missed && !held) setTimeout(refresh, 1000);
  }

  const source = new EventSource(`${main.dataset.events}?seen=${encodeURIComponent(main.dataset.state)}`);
  source.addEventListener("open", () => {
    if (!held) say("live, page as of");
    if (broken) { broken = false; refresh(); }
  });
  source.addEventListener("changed", refresh);
  source.addEventListener("error", () => {
    broken = true;
    say(source.readyState === EventSource.CLOSED ? "not live: reload the page" : "not live: reconnecting");
  });

  count();
  offer();
  setInterval(count, 500);
  hold.hidden = false;
  hold.addEventListener("click", () => {
    held = !held;
    hold.textContent = held ? "Resume" : "Pause";
    say(held ? "paused, as of" : "live, page as of");
    if (!held && missed) refresh();
  });
})();
