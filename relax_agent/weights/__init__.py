"""Publishing new weights to a fleet of engines."""

from relax_agent.weights.publish import PublishReport, publish
from relax_agent.weights.settings import WeightsSettings

__all__ = ["PublishReport", "WeightsSettings", "publish"]
