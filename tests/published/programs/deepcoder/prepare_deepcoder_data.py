"""Problems with their tests, in the words of LiveCodeBench."""

import json

from rllm.data.dataset import DatasetRegistry
from rllm.data.utils import fetch_live_code_bench_system_prompt


def preprocess(row):
    return {
        "question": fetch_live_code_bench_system_prompt(row["prompt"]),
        "ground_truth": json.dumps(row["tests"]),
        "data_source": "livecodebench",
    }


def prepare_deepcoder_data():
    problems = [
        {
            "prompt": f"Read a number and print it times {factor}.",
            "tests": [{"input": f"{n}\n", "output": f"{factor * n}\n", "testtype": "stdin"} for n in (1, 7)],
        }
        for factor in range(2, 8)
    ]
    rows = [preprocess(each) for each in problems]
    train = DatasetRegistry.register_dataset("deepcoder", rows[:4], "train")
    test = DatasetRegistry.register_dataset("deepcoder", rows[4:], "test")
    return train, test


if __name__ == "__main__":
    prepare_deepcoder_data()
