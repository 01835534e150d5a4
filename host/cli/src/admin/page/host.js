// Asking the host, and how its figures are written. Everything that it answers is data, and becomes text: never markup.

let token = sessionStorage.getItem('timetable-token') ?? '';

/** The host's answer; an Error says in plain words why there is none. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw Object.assign(new Error('the host does not answer'), { gone: true });
  }
  const answer = await response.json().catch(() => ({ error: `an answer that is not understood (${response.status})` }));
  if (response.status === 401) {
    await login();
    return ask(path, options);
  }
  if (!response.ok) throw new Error(answer.error ?? `an error without a message (${response.status})`);
  return answer;
}

/** Changes something: says that it means to. */
export function change(path, parameters, body) {
  const query = new URLSearchParams(parameters);
  return ask(`${path}?${query}`, { method: 'POST', body, headers: { 'X-Timetable-Admin': '1' } });
}

let asking;

/** Asks the operator for the token, once for all who want it. */
function login() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById('login');
    const field = document.getElementById('token');
    field.value = '';
    dialog.addEventListener('close', () => {
      token = field.value.trim();
      sessionStorage.setItem('timetable-token', token);
      asking = undefined;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** An element with text in it. */
export function element(name, text = '', ...classes) {
  const made = document.createElement(name);
  made.textContent = text;
  made.classList.add(...classes);
  return made;
}

/** Writes `text` where it changes, so that what is selected stays. */
export function write(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

export const count = (value) => Number(value ?? 0).toLocaleString('en-US');
export const short = (hash) => String(hash ?? '').slice(0, 12);

export function time(ns) {
  if (ns === null || ns === undefined) return '–';
  for (const [unit, size] of [['s', 1e9], ['ms', 1e6], ['µs', 1e3]]) {
    if (ns >= size) return `${(ns / size).toFixed(ns >= 100 * size ? 0 : ns >= 10 * size ? 1 : 2)} ${unit}`;
  }
  return `${Math.round(ns)} ns`;
}

export function bytes(size) {
  if (size < 1000) return `${size} bytes`;
  return size < 1e6 ? `${(size / 1e3).toFixed(1)} kB` : `${(size / 1e6).toFixed(1)} MB`;
}
