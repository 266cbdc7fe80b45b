// A turn as text for elsewhere: messages, a request for a server, a test.

export function asMessages(full) {
  return JSON.stringify([...full.messages, { role: "assistant", content: full.answer }], null, 2);
}

/** A request that asks a server the same. */
export function asCurl(full) {
  const body = { model: full.model || "MODEL", messages: full.messages, ...(full.temperature === null ? {} : { temperature: full.temperature }) };
  return `curl "\${BASE_URL:-http://127.0.0.1:8000/v1}/chat/completions" \\\n  -H "Authorization: Bearer $API_KEY" -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;
}

/** A test of what the stored episode holds: the answer, its reward, and how the episode ended. */
export function asPytest(full, page, trajectory, turn) {
  const text = (value) => pythonText(value ?? "");
  return `from pathlib import Path

from rllm.store import EpisodeStore


def test_episode_${page.id}_turn_${turn.turn + 1}() -> None:
    """${words(page.task_id)}, attempt ${page.attempt}."""
    with EpisodeStore.open(Path(${text(full.store)}), read_only=True) as store:
        episode = store.episode(${page.id})
    step = episode.trajectories[${trajectory.index}].steps[${turn.turn}]
    assert step.model_response == ${text(full.answer)}
    assert step.reward == ${turn.reward}
    assert episode.is_correct is ${page.is_correct ? "True" : "False"}
`;
}

function words(text) {
  return text.replace(/[^\w .:,-]/g, " ");
}

/** A text as Python writes it: JSON's escapes are Python's as well. */
function pythonText(value) {
  return JSON.stringify(value).replace(/[\u007f-\uffff]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** A text as a word of a shell. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
