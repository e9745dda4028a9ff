"""A model that makes the control frames of a clip, as one request uses it: it estimates depth, or finds poses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.core.frozen import FrozenModel

# Such a model in the memory of a plan, and in events.
PREPROCESSOR = "preprocessor"
# The parts that it consists of.
DEPTH_ESTIMATOR, POSE_ESTIMATOR, PERSON_DETECTOR = "depth_estimator", "pose_estimator", "person_detector"


class PreprocessorUse(FrozenModel):
    """A model that makes control frames.

    Attributes:
        kind: one of `request.BY_MODEL`.
        title: for people.
        license: of its weights; "unknown" if a folder of the user's does not say it.
        digest: of the files that decide what it makes.
        folders: the folder of each part; `parameters` has its number of weights.
        batch: frames of one call.
    """

    kind: str
    title: str
    license: str
    digest: str
    folders: Mapping[str, Path]
    parameters: Mapping[str, int]
    batch: int = 1

    def summary(self) -> dict[str, Any]:
        """Return what results record of it, as JSON values: its title, license and digest, not its folders."""
        return self.model_dump(mode="json", exclude={"folders"})

    @property
    def weights_bytes(self) -> int:
        """Bytes of its weights, which it computes in: float32."""
        return 4 * sum(self.parameters.values())
