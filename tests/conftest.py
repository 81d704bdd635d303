"""Settings of all tests."""

import os

from hypothesis import settings

# A busy machine makes no test fail by the clock, and CI tries the same examples every time.
settings.register_profile("fullrank", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fullrank")
