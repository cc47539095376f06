"""Arrays of planning: R steps side by side are their first axis; docstrings give the shapes."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
