"""Products that nobody knows by heart."""

from rllm.data.dataset import DatasetRegistry

if __name__ == "__main__":
    rows = [
        {"question": f"{17 * n} * {23 + n}?", "ground_truth": str(17 * n * (23 + n)), "data_source": "math"}
        for n in range(2, 12)
    ]
    DatasetRegistry.register_dataset("products", rows[:8], "train")
    DatasetRegistry.register_dataset("products", rows[8:], "test")
