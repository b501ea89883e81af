"""What `helm test` runs: waits until the cell is ready, lists the models, and asks one for tokens."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

URL = os.environ["URL"]
DEADLINE = time.monotonic() + float(os.environ.get("TIMEOUT_S", "600"))
HEADERS = {"Content-Type": "application/json"}
if "API_KEY" in os.environ:
    HEADERS["Authorization"] = f"Bearer {os.environ['API_KEY'].strip()}"


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, HEADERS)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


while True:
    try:
        call("/ready")
        break
    except OSError as error:
        if time.monotonic() > DEADLINE:
            sys.exit(f"{URL}/ready does not answer: {error}")
        print(f"not ready yet: {error}", flush=True)
        time.sleep(2)

try:
    model = call("/v1/models")["data"][0]["id"]
    answer = call("/v1/completions", {"model": model, "prompt": "import os", "max_tokens": 8})
except urllib.error.HTTPError as error:
    sys.exit(f"{error.url}: {error.code} {error.read().decode(errors='replace')}")
if answer["usage"]["completion_tokens"] < 1:
    sys.exit(f"no token: {answer}")
print(f"{model} answers: {answer['choices'][0]['text']!r}")
