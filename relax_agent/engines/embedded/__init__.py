"""The embedded engine: any Hugging Face causal LM behind SGLang's HTTP protocol, on the CPU.

One process. An event loop speaks HTTP (:mod:`.server`), one thread owns the model and decodes
all running requests together (:mod:`.scheduler`). Start it with
``python -m relax_agent.engines.embedded --model-path FOLDER``.

    requests.py    JSON in, checked; JSON out
    media.py       pictures, sounds and films of a prompt: found, decoded, counted
    prefix.py      the radix tree of known prefixes (ids only)
    kv.py          key-value slots of running requests; the pool behind the radix tree
    attention.py   one forward over rows of different length, without padding the model
    routes.py      the experts of a mixture: which were chosen, and their arithmetic
    runner.py      the model itself: load, forward
    sampling.py    logits to tokens and log-probs, repeatable per request
    weights.py     checked, all-or-nothing weight updates
    sequence.py    one request from arrival to answer
    batch.py       continuous batching: who joins, decodes, ends
    scheduler.py   the thread: inbox, pause, weight sessions
    server.py      the HTTP endpoints
"""
