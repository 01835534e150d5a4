"""The official `openai` client, unmodified, against `timetable serve` with a tiny model.

`host/cli/tests/api/openai.rs` starts the servers and runs this file; TIMETABLE_SERVERS says where they are, as JSON:

    open     no keys, room for everybody
    guarded  the keys key-a and key-b of the tenants a and b; one request runs, one waits, more are refused
    hasty    ends every request after one second
    plain    the model without a chat template

The model's words are t0 to t511, its context is long, so that a request for LONG tokens lasts until it is ended.
"""

import asyncio
import json
import math
import os
import time
import unittest
import urllib.error
import urllib.request

import openai
from openai import AsyncOpenAI, OpenAI

SERVERS = json.loads(os.environ["TIMETABLE_SERVERS"])
# Much more than anything takes.
PATIENCE = 120.0
LONG = 30_000
PROMPT = "t5 t6 t7"
MESSAGES = [{"role": "user", "content": "t5 t6 t7"}]


def client(server="open", kind=OpenAI, **options):
    defaults = dict(api_key="key-a", max_retries=0, timeout=PATIENCE)
    return kind(base_url=SERVERS[server] + "/v1", **{**defaults, **options})


def fetch(path, server="open", body=None):
    """What the server answers outside of OpenAI's API, as text."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key-a"}
    request = urllib.request.Request(SERVERS[server] + path, data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return answer.read().decode()


def metric(name, server="open", **labels):
    """The sum of a metric's series with these labels."""
    total = 0.0
    for line in fetch("/metrics", server).splitlines():
        series, _, value = line.rpartition(" ")
        wanted = all(f'{key}="{text}"' in series for key, text in labels.items())
        if series.split("{")[0] == name and wanted:
            total += float(value)
    return total


def wait_until_idle(server="open"):
    """Nothing runs, waits or holds a block."""
    names = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
    deadline = time.monotonic() + PATIENCE
    while any(metric(name, server) != 0 for name in names):
        if time.monotonic() > deadline:
            raise AssertionError(f"not idle: { {name: metric(name, server) for name in names} }")
        time.sleep(0.02)


def text_of(chunks):
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def content_of(chunks):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


class Case(unittest.TestCase):
    def setUp(self):
        self.client = client()
        self.addCleanup(self.client.close)
        # Refuses answers that have another shape than the client's types say. OpenAI's own pieces of a completion have.
        self.strict = client(_strict_response_validation=True)
        self.addCleanup(self.strict.close)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt=PROMPT, **options):
        options = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 12, **options}
        asked = self.client if options.get("stream") else self.strict
        return asked.completions.create(**options)

    def chat(self, messages=MESSAGES, **options):
        options = {"model": self.model, "messages": messages, "temperature": 0, "max_completion_tokens": 12, **options}
        return self.strict.chat.completions.create(**options)

    def refuses(self, error, call, *, code=None, param=None, contains=""):
        """`call` raises `error`, whose body is OpenAI's."""
        with self.assertRaises(error) as raised:
            call()
        found = raised.exception
        self.assertIsInstance(found.body, dict)
        self.assertEqual({"message", "type", "param", "code"}, set(found.body))
        self.assertIn(contains, found.body["message"])
        if code is not None:
            self.assertEqual(code, found.code)
        if param is not None:
            self.assertEqual(param, found.param)
        return found


class Models(Case):
    def test_list_has_the_model(self):
        models = list(self.strict.models.list())
        self.assertEqual(1, len(models))
        self.assertEqual("model", models[0].object)
        self.assertGreater(models[0].created, 1_700_000_000)

    def test_retrieve_gives_it_by_name(self):
        self.assertEqual(self.model, self.client.models.retrieve(self.model).id)

    def test_unknown_model_is_not_found(self):
        self.refuses(openai.NotFoundError, lambda: self.client.models.retrieve("gpt-0"), code="model_not_found")
        error = self.refuses(openai.NotFoundError, lambda: self.complete(model="gpt-0"), code="model_not_found")
        self.assertIn("gpt-0", error.message)
        self.refuses(openai.NotFoundError, lambda: self.chat(model="gpt-0"), code="model_not_found")


class Completions(Case):
    def test_answer_has_text_usage_and_reason(self):
        answer = self.complete(extra_body={"ignore_eos": True})
        self.assertEqual("text_completion", answer.object)
        self.assertEqual(self.model, answer.model)
        [choice] = answer.choices
        self.assertEqual((0, "length"), (choice.index, choice.finish_reason))
        self.assertEqual(12, len(choice.text.split()))
        usage = answer.usage
        self.assertEqual((3, 12, 15), (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens))

    def test_tokens_are_those_of_generate(self):
        """The same as the command line computes, alone."""
        for prompt, text in SERVERS["expected"].items():
            answer = self.complete(prompt, max_tokens=24, extra_body={"ignore_eos": True})
            self.assertEqual(text, answer.choices[0].text)

    def test_stream_has_the_same_text_and_usage(self):
        whole = self.complete()
        chunks = list(self.complete(stream=True, stream_options={"include_usage": True}))
        self.assertGreater(len(chunks), 2)
        self.assertEqual(whole.choices[0].text, text_of(chunks))
        self.assertEqual([], chunks[-1].choices)
        self.assertEqual(whole.usage, chunks[-1].usage)
        self.assertTrue(all(chunk.usage is None for chunk in chunks[:-1]))
        self.assertEqual(1, len({chunk.id for chunk in chunks}))
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        self.assertEqual(whole.choices[0].finish_reason, reasons[-1])
        self.assertTrue(all(reason is None for reason in reasons[:-1]))

    def test_stream_without_options_has_no_usage(self):
        self.assertTrue(all(chunk.usage is None for chunk in self.complete(stream=True)))

    def test_prompts_of_tokens_and_several_prompts(self):
        text = self.complete().choices[0].text
        self.assertEqual(text, self.complete([5, 6, 7]).choices[0].text)
        several = self.complete([PROMPT, "t9 t8", PROMPT])
        self.assertEqual([0, 1, 2], [choice.index for choice in several.choices])
        self.assertEqual([text, self.complete("t9 t8").choices[0].text, text], [c.text for c in several.choices])
        self.assertEqual(8, several.usage.prompt_tokens)
        tokens = self.complete([[5, 6, 7], [9, 8]])
        self.assertEqual([choice.text for choice in several.choices[:2]], [choice.text for choice in tokens.choices])

    def test_stop_ends_the_text_before_it(self):
        words = self.complete(extra_body={"ignore_eos": True}).choices[0].text.split()
        stop = words[4]
        before = words.index(stop)
        for given in [stop, [stop], ["never", stop]]:
            choice = self.complete(stop=given, extra_body={"ignore_eos": True}).choices[0]
            self.assertEqual("stop", choice.finish_reason)
            self.assertEqual(words[:before], choice.text.split())
            streamed = self.complete(stop=given, stream=True, extra_body={"ignore_eos": True})
            self.assertEqual(choice.text, text_of(streamed))

    def test_seed_repeats_an_answer(self):
        def drawn(**options):
            return self.complete(temperature=1.5, max_tokens=24, **options).choices[0].text

        self.assertEqual(drawn(seed=7), drawn(seed=7))
        self.assertGreater(len({drawn(seed=seed) for seed in range(8)}), 4)
        self.assertGreater(len({drawn() for _ in range(8)}), 4)

    def test_n_gives_that_many_answers(self):
        options = dict(n=3, temperature=1.5, seed=11, max_tokens=24)
        answer = self.complete(**options)
        texts = [choice.text for choice in answer.choices]
        self.assertEqual([0, 1, 2], [choice.index for choice in answer.choices])
        self.assertEqual(3, len(set(texts)))
        self.assertEqual(3, answer.usage.prompt_tokens)
        streamed = {0: "", 1: "", 2: ""}
        for chunk in self.complete(stream=True, **options):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        self.assertEqual(texts, list(streamed.values()))

    def test_logprobs_are_the_likeliest_tokens(self):
        answer = self.complete(logprobs=5, max_tokens=6, extra_body={"ignore_eos": True})
        logprobs = answer.choices[0].logprobs
        self.assertEqual(6, len(logprobs.tokens))
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
            # Greedy: the chosen token is the likeliest.
            self.assertAlmostEqual(max(top.values()), logprob, places=5)
            self.assertAlmostEqual(top[token], logprob, places=5)
            self.assertGreaterEqual(len(top), 5)
            self.assertLessEqual(sum(math.exp(value) for value in top.values()), 1 + 1e-4)
        self.assertEqual(sorted(logprobs.text_offset), logprobs.text_offset)
        streamed = []
        for chunk in self.complete(logprobs=5, max_tokens=6, stream=True, extra_body={"ignore_eos": True}):
            for choice in chunk.choices:
                if choice.logprobs:
                    streamed += choice.logprobs.token_logprobs
        self.assertEqual(logprobs.token_logprobs, streamed)

    def test_penalties_change_the_answer(self):
        def greedy(**options):
            return self.complete(max_tokens=200, extra_body={"ignore_eos": True}, **options).choices[0].text.split()

        plain, penalised = greedy(), greedy(frequency_penalty=2.0, presence_penalty=2.0)
        self.assertGreater(len(set(penalised)), len(set(plain)))

    def test_logit_bias_forces_and_forbids_a_token(self):
        forced = self.complete(max_tokens=3, logit_bias={"77": 100}, extra_body={"ignore_eos": True})
        self.assertEqual(["t77"] * 3, forced.choices[0].text.split())
        first = self.complete(max_tokens=1, extra_body={"ignore_eos": True}).choices[0].text.strip()
        bias = {first[1:]: -100}
        other = self.complete(max_tokens=1, logit_bias=bias, extra_body={"ignore_eos": True}).choices[0].text.strip()
        self.assertNotEqual(first, other)

    def test_echo_begins_with_the_prompt(self):
        answer, echoed = self.complete(), self.complete(echo=True)
        self.assertEqual(PROMPT + answer.choices[0].text, echoed.choices[0].text)
        self.assertEqual(echoed.choices[0].text, text_of(self.complete(echo=True, stream=True)))

    def test_extra_body_top_k_and_stop_token_ids(self):
        greedy = self.complete(extra_body={"ignore_eos": True}).choices[0].text
        first = self.complete(temperature=2, extra_body={"top_k": 1, "ignore_eos": True}).choices[0].text
        self.assertEqual(greedy, first)
        words = greedy.split()
        token = int(words[5][1:])
        choice = self.complete(extra_body={"stop_token_ids": [token], "ignore_eos": True}).choices[0]
        self.assertEqual("stop", choice.finish_reason)
        self.assertEqual(words[: words.index(words[5])], choice.text.split()[: words.index(words[5])])
        self.assertLessEqual(len(choice.text.split()), words.index(words[5]) + 1)

    def test_extra_body_ignore_eos_goes_on(self):
        prompts = [f"t{first} t{first + 1}" for first in range(40, 99)]
        answers = self.complete(prompts, max_tokens=60)
        ended = [choice for choice in answers.choices if choice.finish_reason == "stop"]
        self.assertTrue(ended, "none of the prompts leads to the end of text")
        choice = ended[0]
        longer = self.complete(prompts[choice.index], max_tokens=60, extra_body={"ignore_eos": True}).choices[0]
        self.assertEqual("length", longer.finish_reason)
        self.assertTrue(longer.text.startswith(choice.text))
        self.assertGreater(len(longer.text), len(choice.text))

    def test_raw_response_has_headers(self):
        raw = self.client.completions.with_raw_response.create(model=self.model, prompt=PROMPT, max_tokens=1)
        self.assertEqual("application/json", raw.headers["content-type"].split(";")[0])
        self.assertEqual("text_completion", raw.parse().object)


class Chat(Case):
    def test_answer_has_a_message(self):
        answer = self.chat(extra_body={"ignore_eos": True})
        self.assertEqual("chat.completion", answer.object)
        [choice] = answer.choices
        self.assertEqual("assistant", choice.message.role)
        # A token that is special has no text.
        self.assertIn(len(choice.message.content.split()), range(6, 13))
        self.assertEqual("length", choice.finish_reason)
        self.assertEqual(12, answer.usage.completion_tokens)

    def test_prompt_is_what_the_template_makes(self):
        rendered = json.loads(fetch("/tokenize", body={"messages": MESSAGES}))
        self.assertEqual(rendered["count"], self.chat().usage.prompt_tokens)
        completed = self.complete(rendered["tokens"]).choices[0].text
        self.assertEqual(completed.split(), self.chat().choices[0].message.content.split())

    def test_stream_has_the_same_text_and_usage(self):
        whole = self.chat()
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(whole.choices[0].message.content, content_of(chunks))
        self.assertEqual("assistant", chunks[0].choices[0].delta.role)
        self.assertEqual(whole.usage, chunks[-1].usage)
        self.assertEqual([], chunks[-1].choices)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        self.assertEqual(whole.choices[0].finish_reason, reasons[-1])

    def test_stream_helper_accumulates(self):
        # The helper takes an answer that was cut off for an error.
        stop = self.chat().choices[0].message.content.split()[5]
        arguments = dict(model=self.model, messages=MESSAGES, temperature=0, max_completion_tokens=12, stop=stop)
        with self.client.chat.completions.stream(**arguments) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        content = self.chat(stop=stop).choices[0].message.content
        self.assertEqual(content, "".join(deltas))
        self.assertEqual(content, final.choices[0].message.content)

    def test_both_names_of_the_limit(self):
        def tokens(**options):
            options = dict(model=self.model, messages=MESSAGES, extra_body={"ignore_eos": True}, **options)
            return self.client.chat.completions.create(**options).usage.completion_tokens

        self.assertEqual(3, tokens(max_completion_tokens=3))
        self.assertEqual(4, tokens(max_tokens=4))
        self.assertEqual(5, tokens(max_tokens=5, max_completion_tokens=5))

    def test_parts_and_roles(self):
        parts = [{"type": "text", "text": "t5 t6 t7"}]
        content = self.chat().choices[0].message.content
        self.assertEqual(content, self.chat([{"role": "user", "content": parts}]).choices[0].message.content)
        conversation = [
            {"role": "system", "content": "t50"},
            {"role": "user", "content": "t51"},
            {"role": "assistant", "content": "t52"},
            {"role": "user", "content": "t53"},
        ]
        self.assertGreater(self.chat(conversation).usage.prompt_tokens, self.chat().usage.prompt_tokens)
        picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        self.refuses(openai.BadRequestError, lambda: self.chat([{"role": "user", "content": picture}]))

    def test_logprobs_have_alternatives(self):
        answer = self.chat(logprobs=True, top_logprobs=4, extra_body={"ignore_eos": True})
        content = answer.choices[0].logprobs.content
        self.assertEqual(12, len(content))
        for entry in content:
            self.assertEqual(4, len(entry.top_logprobs))
            self.assertEqual(entry.token, entry.top_logprobs[0].token)
            values = [top.logprob for top in entry.top_logprobs]
            self.assertEqual(sorted(values, reverse=True), values)
            self.assertLessEqual(values[0], 0)
            self.assertEqual(entry.token, bytes(entry.bytes).decode())
        chunks = self.chat(logprobs=True, top_logprobs=4, stream=True, extra_body={"ignore_eos": True})
        logprobs = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
        streamed = [entry.logprob for found in logprobs for entry in found.content or []]
        self.assertEqual([entry.logprob for entry in content], streamed)

    def test_n_stop_and_seed(self):
        options = dict(n=2, seed=3, temperature=1.5, max_completion_tokens=20)
        first, second = self.chat(**options), self.chat(**options)
        texts = [choice.message.content for choice in first.choices]
        self.assertEqual(texts, [choice.message.content for choice in second.choices])
        self.assertEqual(2, len(set(texts)))
        words = self.chat(extra_body={"ignore_eos": True}).choices[0].message.content.split()
        stopped = self.chat(stop=words[3], extra_body={"ignore_eos": True}).choices[0]
        self.assertEqual("stop", stopped.finish_reason)
        self.assertEqual(words[: words.index(words[3])], stopped.message.content.split())

    def test_model_without_a_template_says_so(self):
        plain = client("plain")
        self.addCleanup(plain.close)
        model = plain.models.list().data[0].id
        ask = lambda: plain.chat.completions.create(model=model, messages=MESSAGES)
        self.refuses(openai.BadRequestError, ask, contains="chat template")


class Errors(Case):
    def test_bad_parameters_are_named(self):
        bad = [
            ("temperature", dict(temperature=-1)),
            ("temperature", dict(temperature="hot")),
            ("top_p", dict(top_p=1.5)),
            ("max_tokens", dict(max_tokens=0)),
            ("max_tokens", dict(max_tokens=1.5)),
            ("n", dict(n=0)),
            ("stop", dict(stop=[""])),
            ("stop", dict(stop=5)),
            ("seed", dict(seed="x")),
            ("logprobs", dict(logprobs=-1)),
            ("stream_options", dict(stream_options={"include_usage": True})),
            ("top_k", dict(extra_body={"top_k": -2})),
            ("ignore_eos", dict(extra_body={"ignore_eos": "yes"})),
            ("prompt", dict(prompt=[])),
            ("prompt", dict(prompt=[[]])),
            ("prompt", dict(prompt=[5, 512])),
            ("suffix", dict(suffix="t1")),
            ("best_of", dict(best_of=2)),
            ("echo", dict(echo=True, logprobs=1)),
            ("logit_bias", dict(logit_bias={"5": 101})),
        ]
        for param, options in bad:
            with self.subTest(**options):
                error = self.refuses(openai.BadRequestError, lambda: self.complete(**options))
                self.assertEqual(param, (error.param or "").split("[")[0].split(".")[0])

    def test_bad_chat_parameters_are_named(self):
        bad = [
            ("messages", dict(messages=[])),
            ("messages", dict(messages=[{"role": "user"}])),
            ("messages", dict(messages=[{"role": "nobody", "content": "t5"}])),
            ("messages", dict(messages="t5")),
            ("top_logprobs", dict(top_logprobs=3)),
            ("top_logprobs", dict(logprobs=True, top_logprobs=21)),
            ("response_format", dict(response_format={"type": "json_object"})),
            ("tool_choice", dict(tool_choice="required")),
            ("max_tokens", dict(max_tokens=3, max_completion_tokens=4)),
        ]
        for param, options in bad:
            with self.subTest(**options):
                error = self.refuses(openai.BadRequestError, lambda: self.chat(**options))
                self.assertEqual(param, (error.param or "").split("[")[0].split(".")[0])

    def test_prompt_beyond_the_context(self):
        self.refuses(
            openai.BadRequestError, lambda: self.complete("t5 " * 40_000), code="context_length_exceeded"
        )

    def test_embeddings_are_refused(self):
        ask = lambda: self.client.embeddings.create(model=self.model, input="t5")
        self.refuses(openai.NotFoundError, ask, code="unsupported")

    def test_other_endpoints_are_not_found(self):
        self.refuses(openai.NotFoundError, lambda: self.client.responses.create(model=self.model, input="t5"))

    def test_fields_of_the_future_are_ignored(self):
        answer = self.complete(extra_body={"a_field_of_the_future": {"x": [1]}})
        self.assertEqual(self.complete().choices, answer.choices)

    def test_nobody_listens(self):
        nobody = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
        self.addCleanup(nobody.close)
        with self.assertRaises(openai.APIConnectionError):
            nobody.models.list()


class Keys(Case):
    def test_wrong_and_missing_keys(self):
        wrong = client("guarded", api_key="key-of-nobody")
        self.addCleanup(wrong.close)
        error = self.refuses(openai.AuthenticationError, wrong.models.list, code="invalid_api_key")
        self.assertNotIn("key-of-nobody", error.message)
        ask = lambda: wrong.completions.create(model="any", prompt=PROMPT)
        self.refuses(openai.AuthenticationError, ask, code="invalid_api_key")
        with self.assertRaises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(SERVERS["guarded"] + "/v1/models", timeout=PATIENCE)
        self.assertEqual(401, raised.exception.code)
        raised.exception.close()

    def test_keys_are_tenants(self):
        wait_until_idle("guarded")
        for key, tenant in [("key-a", "a"), ("key-b", "b")]:
            own = client("guarded", api_key=key)
            self.addCleanup(own.close)
            model = own.models.list().data[0].id
            before = metric("timetable_tenant_tokens_total", "guarded", tenant=tenant, kind="generated")
            own.completions.create(model=model, prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True})
            deadline = time.monotonic() + PATIENCE
            while metric("timetable_tenant_tokens_total", "guarded", tenant=tenant, kind="generated") != before + 5:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)


class Limits(Case):
    def test_full_queue_is_a_rate_limit(self):
        """One runs and one waits; the third is told when to come again, and does."""
        wait_until_idle("guarded")

        async def read(own, **options):
            async for _ in await own.completions.create(max_tokens=LONG, stream=True, **options):
                pass

        async def until(count, name):
            deadline = time.monotonic() + PATIENCE
            while metric(name, "guarded") != count:
                self.assertLess(time.monotonic(), deadline)
                await asyncio.sleep(0.02)

        async def work():
            async with client("guarded", AsyncOpenAI) as own:
                model = [model.id async for model in own.models.list()][0]
                ask = dict(model=model, prompt=PROMPT, extra_body={"ignore_eos": True})
                running = asyncio.create_task(read(own, **ask))
                await until(1, "vllm:num_requests_running")
                waiting = asyncio.create_task(read(own, **ask))
                await until(1, "vllm:num_requests_waiting")
                with self.assertRaises(openai.RateLimitError) as raised:
                    await own.completions.create(max_tokens=2, **ask)
                patient = own.with_options(max_retries=30)
                asked = asyncio.create_task(patient.completions.create(max_tokens=2, **ask))
                await asyncio.sleep(0.3)
                self.assertFalse(asked.done())
                running.cancel()
                waiting.cancel()
                await asyncio.gather(running, waiting, return_exceptions=True)
                return raised.exception, await asked

        error, answer = asyncio.run(asyncio.wait_for(work(), PATIENCE))
        self.assertEqual("queue_full", error.code)
        self.assertGreaterEqual(int(error.response.headers["retry-after"]), 1)
        self.assertEqual(2, answer.usage.completion_tokens)
        wait_until_idle("guarded")

    def test_client_timeout_frees_the_request(self):
        impatient = self.client.with_options(timeout=0.5)
        with self.assertRaises(openai.APITimeoutError):
            impatient.completions.create(
                model=self.model, prompt=PROMPT, max_tokens=LONG, extra_body={"ignore_eos": True}
            )
        wait_until_idle()

    def test_server_timeout_is_an_error(self):
        hasty = client("hasty")
        self.addCleanup(hasty.close)
        model = hasty.models.list().data[0].id
        ask = dict(model=model, prompt=PROMPT, extra_body={"ignore_eos": True})
        error = self.refuses(
            openai.APIStatusError, lambda: hasty.completions.create(max_tokens=LONG, **ask), code="timeout"
        )
        self.assertEqual(408, error.status_code)
        wait_until_idle("hasty")
        # What is quick is answered.
        self.assertEqual(2, hasty.completions.create(max_tokens=2, **ask).usage.completion_tokens)

    def test_server_timeout_ends_a_stream(self):
        hasty = client("hasty")
        self.addCleanup(hasty.close)
        model = hasty.models.list().data[0].id
        pieces = 0
        with self.assertRaises(openai.APIError) as raised:
            for _ in hasty.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_completion_tokens=LONG,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                pieces += 1
        self.assertGreater(pieces, 0)
        self.assertEqual("timeout", raised.exception.code)
        wait_until_idle("hasty")

    def test_hanging_up_frees_the_request(self):
        for make in [self.complete, self.chat]:
            limit = "max_tokens" if make == self.complete else "max_completion_tokens"
            stream = make(stream=True, extra_body={"ignore_eos": True}, **{limit: LONG})
            for _ in range(5):
                next(iter(stream))
            self.assertEqual(1, metric("vllm:num_requests_running"))
            stream.close()
            wait_until_idle()


class Async(Case):
    def run_with_client(self, work):
        async def all_of_it():
            async with client(kind=AsyncOpenAI) as own:
                return await asyncio.wait_for(work(own), PATIENCE)

        return asyncio.run(all_of_it())

    def test_both_endpoints(self):
        async def work(own):
            common = dict(model=self.model, temperature=0)
            completed = await own.completions.create(prompt=PROMPT, max_tokens=12, **common)
            answered = await own.chat.completions.create(messages=MESSAGES, max_completion_tokens=12, **common)
            chunks = [c async for c in await own.completions.create(prompt=PROMPT, max_tokens=12, stream=True, **common)]
            pieces = await own.chat.completions.create(
                messages=MESSAGES, max_completion_tokens=12, stream=True, **common
            )
            models = [model.id async for model in own.models.list()]
            return completed, answered, chunks, [piece async for piece in pieces], models

        completed, answered, chunks, pieces, models = self.run_with_client(work)
        self.assertEqual(self.complete().choices, completed.choices)
        self.assertEqual(self.chat().choices, answered.choices)
        self.assertEqual(completed.choices[0].text, text_of(chunks))
        self.assertEqual(answered.choices[0].message.content, content_of(pieces))
        self.assertEqual([self.model], models)

    def test_errors(self):
        async def work(own):
            with self.assertRaises(openai.BadRequestError):
                await own.completions.create(model=self.model, prompt=PROMPT, temperature=9)
            with self.assertRaises(openai.NotFoundError):
                await own.completions.create(model="gpt-0", prompt=PROMPT)
            with self.assertRaises(openai.APITimeoutError):
                await own.with_options(timeout=0.5).completions.create(
                    model=self.model, prompt=PROMPT, max_tokens=LONG, extra_body={"ignore_eos": True}
                )

        self.run_with_client(work)
        wait_until_idle()

    def test_32_streams_at_once_are_as_alone(self):
        prompts = [" ".join(f"t{40 + (7 * row + column) % 60}" for column in range(1 + row)) for row in range(32)]
        options = dict(max_tokens=48, extra_body={"ignore_eos": True})
        alone = [self.complete(prompt, **options).choices[0].text for prompt in prompts]

        async def work(own):
            async def one(prompt):
                stream = await own.completions.create(
                    model=self.model, prompt=prompt, temperature=0, stream=True, **options
                )
                return text_of([chunk async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

        self.assertEqual(alone, self.run_with_client(work))
        wait_until_idle()

    def test_cancelled_tasks_free_their_requests(self):
        async def work(own):
            async def one():
                stream = await own.completions.create(
                    model=self.model, prompt=PROMPT, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
                )
                async for _ in stream:
                    pass

            tasks = [asyncio.create_task(one()) for _ in range(8)]
            await asyncio.sleep(0.5)
            for task in tasks:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        for outcome in self.run_with_client(work):
            self.assertIsInstance(outcome, asyncio.CancelledError)
        wait_until_idle()


if __name__ == "__main__":
    unittest.main(verbosity=2)
