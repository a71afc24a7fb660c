"""Run verl's own ``main_ppo`` command up to the point where it would start Ray.

``python main_script.py [--without-llds] WORDS...``
"""

import sys
from importlib.abc import MetaPathFinder


class Removed(MetaPathFinder):
    """As if the package had been uninstalled."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "llds":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


if sys.argv[1] == "--without-llds":
    sys.argv.pop(1)
    sys.meta_path.insert(0, Removed())

import verl.trainer.main_ppo as command  # noqa: E402
from verl.trainer.ppo.core_algos import get_policy_loss_fn  # noqa: E402


def instead_of_ray(config, *runner, **options):
    print("RAY WOULD START")
    get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    print("THE LOSS IS THERE")


command.run_ppo = instead_of_ray
command.main()
