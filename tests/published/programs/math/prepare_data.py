"""Register the rows that train.py loads by name."""

from rllm.data.dataset import DatasetRegistry


def prepare_math_data():
    rows = [{"question": f"{n} + 1?", "ground_truth": str(n + 1)} for n in range(10)]
    train = DatasetRegistry.register_dataset("sums", rows[:8], "train")
    test = DatasetRegistry.register_dataset("sums", rows[8:], "test")
    return train, test


if __name__ == "__main__":
    prepare_math_data()
