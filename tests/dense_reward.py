"""An environment for short runs: a model that knows nothing yet gets different rewards too."""

from relax_agent.envs import register
from relax_agent.envs.catalog.calculator import CalculatorEnv
from relax_agent.envs.tool_env import Score


@register("test/DenseReward-v0")
class DenseReward(CalculatorEnv):
    """The calculator, where digits in an answer earn something although it is wrong."""

    def score(self, task, transcript):
        full = super().score(task, transcript)
        digits = sum(character.isdigit() for character in transcript.answer)
        return Score(max(full.reward, 0.1 * min(digits, 5)), full.metrics)
