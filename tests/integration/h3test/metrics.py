"""What /metrics shows."""

import re
import urllib.request


def read(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def values(address):
    """{'name{labels}': value} of everything that an endpoint shows."""
    return {name: float(value) for name, value in re.findall(r"^([a-z]\S*(?:\{.*\})?) (\S+)$", read(address), re.MULTILINE)}
