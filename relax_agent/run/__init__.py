"""One run: its recipe, its folder, its processes and the loop that trains.

``start`` checks a recipe and says how the run ended; ``conductor`` drives the services that
``services`` has started through warm start, training (``training``) and evaluation; ``folder`` and
``checkpoints`` know what lies where and what a later run can go on from.
"""
