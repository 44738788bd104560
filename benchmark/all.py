"""Tables and pictures of the README.

python benchmark/all.py --tables   # seconds: prints and draws them from the CSVs
python benchmark/all.py            # a day: first measures what the CSVs lack (remove one to measure it anew)

It needs: pip install imageio gymnasium-robotics 'mujoco<3.12'; peers.py makes an environment of its own.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMANDS = [  # script, what makes it only print (None: it always measures)
    ("ppo_default.py", "--table"),
    ("replay_study.py --tune", "--plot"),
    ("replay_study.py", "--plot"),
    ("replay_cost.py", None),
    ("sac_results.py", "--draw-only"),
    ("sac_fetch.py --max-steps 5000", None),
    ("wsrl_study.py", "--plot"),
    ("het_study.py --tune", "--plot"),
    ("het_study.py", "--plot"),
    ("het_ratios.py", None),
    ("peers.py", "--table"),
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="no training, no timing")
    options = parser.parse_args()
    for command, only_print in COMMANDS:
        if options.tables and only_print is None:
            continue
        command += f" {only_print}" if options.tables else ""
        print(f"\n=== benchmark/{command} ===", flush=True)
        script, *flags = command.split()
        if subprocess.run([sys.executable, HERE / script, *flags], cwd=HERE.parent).returncode:
            sys.exit(f"benchmark/all.py: {command} failed")
