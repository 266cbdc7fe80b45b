"""Rows as the published preparation leaves them: question, ground_truth, data_source."""

from rllm.data.dataset import DatasetRegistry


def prepare_math_data():
    rows = [
        {"question": f"What is {n} squared?", "ground_truth": str(n * n), "data_source": "math"}
        for n in range(2, 12)
    ]
    train = DatasetRegistry.register_dataset("deepscaler_math", rows[:8], "train")
    test = DatasetRegistry.register_dataset("aime2024", rows[8:], "test")
    return train, test


if __name__ == "__main__":
    prepare_math_data()
