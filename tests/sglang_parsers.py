"""Runs under SGLang's own interpreter: reads golden cases with SGLang's parsers.

On standard input: ``{"tools": [...], "parsers": {name: [text, …]}}``. On standard output:
``{name: [[[tool, arguments], …], …]}``, one list of calls a text; None where the parser raised.
"""

import json
import sys


def main():
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    asked = json.load(sys.stdin)
    tools = [Tool(**tool) for tool in asked["tools"]]

    def calls(name, text):
        try:
            _, found = FunctionCallParser(tools, name).parse_non_stream(text)
            return [[call.name, json.loads(call.parameters)] for call in found]
        except Exception:
            return None

    answer = {name: [calls(name, t) for t in texts] for name, texts in asked["parsers"].items()}
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
