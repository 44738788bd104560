"""All tables and pictures of the pages.

python benchmark/all.py --tables   # seconds: prints and draws them from the CSVs
python benchmark/all.py            # a day: first measures what the CSVs lack (remove one to measure it anew)

Fetch and Reacher need: pip install -e .[mujoco]; LoRA: pip install -e .[lora]; race.py, control.py, sac_speed.py:
pip install -e .[peers]; peers.py makes an environment of its own.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a download, or name your folder here
COMMANDS = [  # script and flags, what makes it only print
    ("ppo_default.py", "--tables"),
    ("replay_study.py --tune", "--tables"),
    ("replay_study.py", "--tables"),
    ("lag_study.py", "--tables"),
    ("log_study.py", "--tables"),
    ("peers.py", "--tables"),
    ("race.py", "--tables"),
    (f"real_model.py {MODEL}", "--tables"),
    (f"memory.py {MODEL}", "--tables"),  # needs peft
    ("het_study.py", "--table"),
    (f"real_agent.py {MODEL}", "--tables"),
    ("survivor_study.py --tune", "--tables"),
    ("survivor_study.py", "--tables"),
    ("sac_results.py", "--table"),
    ("sac_speed.py", "--table"),
    ("wsrl_study.py", "--table"),
    ("control.py", "--tables"),
    ("overview.py", ""),
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="no training, no timing")
    options = parser.parse_args()
    for command, only_print in COMMANDS:
        command += f" {only_print}" if options.tables else ""
        print(f"\n=== benchmark/{command} ===", flush=True)
        script, *flags = command.split()
        if subprocess.run([sys.executable, HERE / script, *flags], cwd=HERE.parent).returncode:
            sys.exit(f"benchmark/all.py: {command} failed")
