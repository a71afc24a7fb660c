"""What each of two processes does in ``test_training_alarms``: train with an alarm planted on the first."""

import io
import sys

from llds.dynamics import Event, PhaseMonitor
from llds.training.environment import prepare_environment
from llds.training.progress import PlainDisplay
from llds.training.recipe import load_recipe

prepare_environment()


class Planted(PhaseMonitor):
    """Raises one alarm, at optimizer step 3."""

    done = False

    def update(self, step, series):
        events = super().update(step, series)
        if step == 3 and not Planted.done:
            Planted.done = True
            events.append(
                Event("alarm", "critical", step, 2, 3, ("likelihood", "reward"), {}, {}, "planted.")
            )
        return events


def main():
    import llds.engines.trl.monitor
    from llds.training.run import train

    llds.engines.trl.monitor.PhaseMonitor = Planted
    result = train(load_recipe("tiny", sys.argv[1:]), PlainDisplay(io.StringIO()))
    if not result.finished:
        raise SystemExit("the run should have been finished")


if __name__ == "__main__":
    main()
