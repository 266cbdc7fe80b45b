"""The table of published names: module -> name -> its home here, or why there is none.

A home is `module:name`, or `module` where the name is the same. Modules of this room hold what nothing else
here has. Longer reasons name the successor.
"""


def _all(names: str, home: str) -> dict[str, str]:
    """The same home for several names."""
    return dict.fromkeys(names.split(), home)


_TYPES = "rllm.types"
_REGISTRY = {"DatasetRegistry": "rllm.published.datasets:PublishedRegistry"}
_DATASET = {"Dataset": "rllm.data.dataset", **_REGISTRY}
_ACTS = _all("Action Step Trajectory Episode TrajectoryGroup", _TYPES)
_OUTPUT = {"ModelOutput": _TYPES, "RolloutEngine": "rllm.inference.rollout_engine"}
_ENGINES = _all("OpenAIEngine VerlEngine TinkerEngine", "rllm.published.engines")
_FUNCTIONS = "rllm.rewards.reward_functions"
_REWARD_TYPES = {
    **_all("RewardConfig RewardInput RewardOutput", _FUNCTIONS),
    "RewardType": "rllm.published.rewards",
}
_REWARD_FNS = _all(
    "math_reward_fn code_reward_fn search_reward_fn f1_reward_fn countdown_reward_fn zero_reward "
    "RewardFunction",
    _FUNCTIONS,
)
_TOOL_BASE = {
    **_all("Tool ToolOutput", "rllm.tools.base"),
    "ToolCall": "rllm.types.messages",
}
_EVAL_TYPES = {
    **_all("AgentConfig EvalOutput Signal Task", _TYPES),
    "_extract_agent_answer": "rllm.rewards.extraction:last_assistant_text",
}
_DATA_TASK = "rllm.published.programs:DataTask"
_LOADERS = {
    "load_agent": "rllm.published.programs",
    "load_evaluator": "rllm.rewards.evaluator",
}
_TRAINER = {"AgentTrainer": "rllm.published.trainers"}
_DISTILL_TRAINER = {"AgentDistillTrainer": "rllm.published.trainers"}
_SFT = {"AgentSFTTrainer": "rllm.trainer.sft"}
_EXECUTION = _all(
    "AgentExecutionEngine AsyncAgentExecutionEngine", "rllm.engine.agent_execution:AgentExecutionEngine"
)
_WORKFLOW_ENGINE = _all(
    "AgentWorkflowEngine UnifiedWorkflowEngine", "rllm.engine.agent_workflow:AgentWorkflowEngine"
)
_STORES = {
    "Store": "rllm.published.store:SharedStore",
    "InMemoryStore": "rllm.published.store",
}
_PARSERS = _all("ToolParser QwenToolParser R1ToolParser get_tool_parser", "rllm.published.parsers")
_WEB_AGENT = "rllm.agents.web:WebAgent"
_WEB_TOOLS = {
    "TavilySearchTool": "rllm.tools.web:TavilySearch",
    "TavilyExtractTool": "rllm.tools.web:TavilyExtract",
    "FirecrawlTool": "rllm.tools.web:Firecrawl",
}
_PYTHON = {"PythonInterpreter": "rllm.tools.python"}
_SDK = _all(
    "session get_chat_client get_chat_client_async trajectory get_current_session get_current_session_name "
    "get_current_metadata get_active_session_uids",
    "rllm.published.sdk",
)
_SDK_TYPES = {"Trajectory": _TYPES, "TrajectoryView": f"{_TYPES}:Trajectory", "StepView": f"{_TYPES}:Step"}
_MATH_UTILS = {
    **_all("grade_answer_mathd grade_answer_sympy", "rllm.published.rewards:grade_answer"),
    **_all("extract_answer extract_boxed_answer", "rllm.published.rewards:extract_boxed_answer"),
}
_EVALUATORS = {
    "math": "evaluate_math",
    "mcq": "evaluate_choice",
    "f1": "evaluate_f1",
    "code": "evaluate_code",
    "countdown": "evaluate_countdown",
    "ifeval": "evaluate_instructions",
    "bfcl": "evaluate_calls",
    "llm_equality": "evaluate_equality",
    "llm_judge": "evaluate_judge",
    "translation": "evaluate_translation",
}

NAMES: dict[str, dict[str, str]] = {
    "rllm.inference.providers": _all("ModelPlace Protocol resolve_model", "rllm.build.providers"),
    "rllm.data.dataset": _REGISTRY,
    "rllm.datasets": _DATASET,
    "rllm.data.utils": {"fetch_live_code_bench_system_prompt": "rllm.published.prompts"},
    "rllm.sdk": {**_SDK, **_SDK_TYPES},
    "rllm.sdk.shortcuts": _SDK,
    "rllm.sdk.decorators": _SDK,
    "rllm.types": {
        "AgentFlow": "rllm.published.programs:AgentProgram",
        "Evaluator": "rllm.published.programs:EpisodeJudge",
        "run_agent_flow": "rllm.published.programs",
    },
    "rllm.workflows": _STORES,
    "rllm.workflows.store": _STORES,
    "rllm.workflows.workflow": _ACTS,
    "rllm.workflows.simple_workflow": {"SimpleAgent": "rllm.agents.conversation:ConversationAgent"},
    # agents and environments
    "rllm.agents": {**_ACTS, **_all("MiniWobAgent WebArenaAgent", _WEB_AGENT)},
    "rllm.agents.miniwob_agent": {"MiniWobAgent": _WEB_AGENT},
    "rllm.agents.webarena_agent": {"WebArenaAgent": _WEB_AGENT},
    "rllm.agents.agent": {"BaseAgent": "rllm.agents.base"},
    "rllm.agents.math_agent": {"MathAgent": "rllm.agents.math"},
    "rllm.agents.code_agent": {"CompetitionCodingAgent": "rllm.agents.code"},
    "rllm.agents.tool_agent": _all("ToolAgent MCPToolAgent", "rllm.agents.tool"),
    "rllm.agents.frozenlake_agent": {"FrozenLakeAgent": "rllm.published.frozenlake:FencedLakeAgent"},
    "rllm.agents.system_prompts": _all(
        "SEARCH_SYSTEM_PROMPT TOOL_SYSTEM_PROMPT MATH_SYSTEM_PROMPT", "rllm.published.prompts"
    ),
    "rllm.environments.base": {},
    "rllm.environments.base.base_env": {"BaseEnv": "rllm.environments.base"},
    "rllm.environments.base.single_turn_env": {"SingleTurnEnvironment": "rllm.environments.single_turn"},
    "rllm.environments.base.multi_turn_env": {"MultiTurnEnvironment": "rllm.environments.multi_turn"},
    "rllm.environments.tools": {},
    "rllm.environments.tools.tool_env": {"ToolEnvironment": "rllm.environments.tool"},
    "rllm.environments.tools.mcp_env": {"MCPEnvironment": "rllm.environments.mcp"},
    "rllm.environments.browsergym": {},
    "rllm.environments.browsergym.browsergym": {"BrowserGymEnv": "rllm.published.browsing:BrowserTaskEnv"},
    "rllm.environments.frozenlake": {},
    "rllm.environments.frozenlake.frozenlake": {"FrozenLakeEnv": "rllm.published.frozenlake:NumberedLakeEnv"},
    # engines
    "rllm.engine": {
        **_OUTPUT,
        **_ENGINES,
        "AsyncAgentExecutionEngine": _EXECUTION["AsyncAgentExecutionEngine"],
        "UnifiedWorkflowEngine": _WORKFLOW_ENGINE["UnifiedWorkflowEngine"],
    },
    "rllm.engine.agent_execution_engine": _EXECUTION,
    "rllm.engine.agent_workflow_engine": _WORKFLOW_ENGINE,
    "rllm.engine.unified_workflow_engine": _WORKFLOW_ENGINE,
    "rllm.experimental.engine": _WORKFLOW_ENGINE,
    "rllm.engine.rollout": {**_OUTPUT, **_ENGINES},
    "rllm.engine.rollout.rollout_engine": _OUTPUT,
    "rllm.engine.rollout.openai_engine": {"OpenAIEngine": _ENGINES["OpenAIEngine"]},
    "rllm.engine.rollout.verl_engine": {"VerlEngine": _ENGINES["VerlEngine"]},
    "rllm.engine.rollout.tinker_engine": {"TinkerEngine": _ENGINES["TinkerEngine"]},
    "rllm.experimental.rollout": {**_OUTPUT, **_ENGINES},
    "rllm.parser": _PARSERS,
    "rllm.parser.tool_parser": _PARSERS,
    # rewards and evaluators
    "rllm.rewards": {"RewardType": "rllm.published.rewards"},
    "rllm.rewards.reward_fn": {**_REWARD_FNS, **_REWARD_TYPES},
    "rllm.rewards.reward_types": _REWARD_TYPES,
    "rllm.rewards.math_reward": {
        **_REWARD_TYPES,
        **_all("RewardMathFn math_reward_fn", _FUNCTIONS),
        "rllm_reward_fn_math": "rllm.published.rewards",
    },
    "rllm.rewards.code_reward": {**_REWARD_TYPES, "rllm_reward_fn_code": "rllm.published.rewards"},
    "rllm.rewards.search_reward": {
        **_REWARD_TYPES,
        **_all("RewardSearchFn search_reward_fn", _FUNCTIONS),
    },
    "rllm.rewards.countdown_reward": {"countdown_reward_fn": _FUNCTIONS},
    "rllm.rewards.math_utils": _MATH_UTILS,
    "rllm.rewards.math_utils.utils": _MATH_UTILS,
    "rllm.eval": {**_LOADERS, **_EVAL_TYPES},
    "rllm.eval.types": _EVAL_TYPES,
    "rllm.eval.rollout_decorator": {
        "rollout": "rllm.agents.flow",
        "AgentFlowFn": "rllm.agents.flow:AgentFlow",
    },
    "rllm.eval.agent_loader": {"load_agent": _LOADERS["load_agent"]},
    "rllm.eval.evaluator_loader": {"load_evaluator": _LOADERS["load_evaluator"]},
    "rllm.eval.reward_fns": {},
    "rllm.eval.reward_fns._helpers": {"extract_answer_text": "rllm.published.reward_fns"},
    **{
        f"rllm.eval.reward_fns.{module}": {
            "evaluate": f"rllm.published.reward_fns:{function}",
            "SYSTEM_PROMPT": "rllm.published.reward_fns",
        }
        for module, function in _EVALUATORS.items()
    },
    "rllm.experimental.eval": {**_LOADERS, **_EVAL_TYPES, "Task": _DATA_TASK},
    "rllm.experimental.eval.types": {**_EVAL_TYPES, "Task": _DATA_TASK},
    # tools
    "rllm.tools": {},
    "rllm.tools.tool_base": _TOOL_BASE,
    "rllm.tools.mcp_tool": {"MCPTool": "rllm.tools.mcp"},
    "rllm.tools.multi_tool": {"MultiTool": "rllm.tools.multi"},
    "rllm.tools.code_tools": _PYTHON,
    "rllm.tools.code_tools.python_interpreter": _PYTHON,
    "rllm.tools.web_tools": _WEB_TOOLS,
    # training
    "rllm.trainer": {**_TRAINER, **_DISTILL_TRAINER},
    "rllm.trainer.agent_trainer": _TRAINER,
    "rllm.trainer.distill": _DISTILL_TRAINER,
    "rllm.trainer.unified_trainer": {
        **_TRAINER,
        "UnifiedTrainer": _TRAINER["AgentTrainer"] + ":AgentTrainer",
    },
    "rllm.trainer.agent_sft_trainer": _SFT,
    "rllm.train.agent_trainer": _TRAINER,
    "rllm.experimental.unified_trainer": {
        **_TRAINER,
        "UnifiedTrainer": _TRAINER["AgentTrainer"] + ":AgentTrainer",
    },
    "rllm.utils": _all(
        "compute_pass_at_k save_trajectories colorful_print EpisodeLogger", "rllm.published.records"
    ),
    "rllm.utils.episode_logger": {"EpisodeLogger": "rllm.published.records"},
    "rllm.cli.main": {"cli": "rllm.cli.main:rllm"},
    "rllm.trainer.algorithms.config": {
        "rLLMAdvantageEstimator": "rllm.published.estimators:PublishedEstimator"
    },
    "rllm.experimental.common.config": {
        "rLLMAdvantageEstimator": "rllm.published.estimators:PublishedEstimator"
    },
}
"""Module -> name -> home. A module that is here and nowhere else consists of these names."""

_PLACEHOLDER = "it stands for a class of yours in the published documentation; import your own."
_FRAMEWORKS = (
    "let the framework's own OpenAI model ask `config.base_url` inside a function made with @rllm.rollout; "
    "docs/frameworks.md shows each of them."
)
_ESTIMATOR = (
    "write a function and name it by `algorithm.estimator=my_module.py:my_estimator`; docs/your_own.md says "
    "what it gets and gives."
)
_FILTERS = (
    "`rollout.truncation` says what an attempt counts that a limit cut off, `filters.min_reward_std` and "
    "`filters.dynamic` which groups are learned from (docs/algorithms.md)."
)
_RUNNER = (
    "`rllm eval NAME --agent … --evaluator …` runs evaluations; from Python, rllm.build.evaluation.prepare."
)
_DISTILL = "`rllm distill` and rllm.trainer.AgentDistillTrainer learn from a teacher (docs/distill.md)."
_BACKEND = "a backend of yours is a rllm.trainer.backends.named.BackendKind (docs/architecture.md)."
_ASYNC = (
    "rllm.trainer.AgentTrainer samples while it learns with `schedule.kind` async and "
    "`schedule.max_staleness` (docs/asynchronous.md)."
)
_SANDBOXES = "programs run behind walls by rllm.sandbox.open_sandbox (docs/sandbox.md)."
_HARNESSES = (
    "`rllm eval rows.jsonl --agent harness:NAME` and `rllm train` start command-line agents in a sandbox "
    "(docs/harnesses.md); what runs on the host is a function made with @rllm.rollout."
)
_RAY_ENV = 'a run starts Ray itself: AgentTrainer(backend="ray") or `cluster.kind` (docs/cluster.md).'
_APPWORLD = "AppWorld is not shipped; write a BaseEnv around it (docs/agents.md)."
_SDK_PARTS = "use `session` and `get_chat_client` of rllm.sdk; runs keep every call in their own record."
_MASKS = "nothing here measures what is marked in pictures; write it as a function made with @rllm.evaluator."
_ORDER = "a run orders its tasks itself, by its seed; Dataset has `shuffle`, `repeat`, `select` and `split`."
_TASK_TESTS = "`rllm eval DIRECTORY` grades a directory of tasks by its own tests (docs/eval.md)."
_PROGRAMS = "rllm.engine.TracedEngine runs programs; AgentTrainer(agent_flow=…, evaluator=…) trains them."
_ENVIRONMENT = "read the variables themselves, from `os.environ`."
_PREFIXES = "sessions of rllm.inference keep what was read, so that a later turn is not read again."
_SERVICE = "models are served by `rllm serve model`, a vLLM server, Tinker or verl."
_NO_ALGORITHM_NAMES = {
    **dict.fromkeys(("TransformConfig", "CompactFilteringConfig"), _FILTERS),
    "AlgorithmConfig": "`[algorithm]` says it: `algorithm.estimator`, `algorithm.loss` (docs/algorithms.md).",
}
_NO_REGISTRY = (
    "give the tools themselves, `ToolAgent(tools=[MyTool()])`; by name, an entry point of the group "
    "`rllm.tools`."
)

REFUSED_NAMES: dict[str, dict[str, str]] = {
    "rllm.agents": dict.fromkeys(("Agent", "YourCustomAgent"), _PLACEHOLDER),
    "rllm.environments": {"YourCustomEnvironment": _PLACEHOLDER},
    "rllm.workflows": {"TimingTrackingMixin": "each Step has `timings`: `model_s`, `env_s`, `grader_s`."},
    "rllm.data": dict.fromkeys(("StatefulTaskDataLoader", "interleave_tasks"), _ORDER),
    "rllm.data.dataset": {"StatefulTaskDataLoader": _ORDER},
    "rllm.engine": {
        **dict.fromkeys(("AgentFlowEngine", "RemoteAgentFlowEngine", "AgentSdkEngine"), _PROGRAMS),
        "FireworksEngine": _SERVICE,
    },
    "rllm.engine.rollout": {
        **dict.fromkeys(("Completer", "TITOCompleter"), _PREFIXES),
        "FireworksEngine": _SERVICE,
    },
    "rllm.parser": {
        "ChatTemplateParser": "rllm.rendering.chat.ChatRenderer makes prompts, by the model's own template."
    },
    "rllm.eval": dict.fromkeys(("run_dataset", "resolve_evaluator_from_catalog", "EvalRunner"), _RUNNER),
    "rllm.experimental.eval": dict.fromkeys(
        ("run_dataset", "resolve_evaluator_from_catalog", "EvalRunner"), _RUNNER
    ),
    "rllm.trainer.algorithms.config": _NO_ALGORITHM_NAMES,
    "rllm.experimental.common.config": _NO_ALGORITHM_NAMES,
    "rllm.tools": {"ToolRegistry": _NO_REGISTRY},
    "rllm.trainer.sft": {"SFTSpec": "AgentSFTTrainer(config={…}) takes the keys of docs/sft.md."},
    "rllm.sandbox": {"create_sandbox": _SANDBOXES},
    "rllm.cli.train": {"build_train_config": "rllm.build.configs.training_config makes a benchmark's."},
}
"""Module -> name -> successor: names that are asked for and have no counterpart."""

REFUSED_MODULES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("rllm.integrations.strands", "rllm.integrations.smolagents"),
            *("rllm.integrations.terminal_terminus_1", "rllm.sdk.integrations"),
        ),
        _FRAMEWORKS,
    ),
    **dict.fromkeys(
        (
            *("rllm.sdk.chat", "rllm.sdk.proxy", "rllm.sdk.proxy.proxy_manager", "rllm.sdk.store"),
            *("rllm.sdk.session", "rllm.sdk.protocol", "rllm.sdk.tracers"),
        ),
        _SDK_PARTS,
    ),
    **dict.fromkeys(("rllm.trainer.algorithms.advantage", "rllm.experimental.common.advantage"), _ESTIMATOR),
    **dict.fromkeys(
        (
            *("rllm.workflows.distillation_workflow", "rllm.trainer.distill.advantage"),
            "rllm.trainer.distill.distillation_workflow",
        ),
        _DISTILL,
    ),
    "rllm.workflows.eval_protocol_workflow": "judge with a function made with @rllm.evaluator.",
    **dict.fromkeys(("rllm.trainer.verl.ray_runtime_env",), _RAY_ENV),
    **dict.fromkeys(
        (
            *("rllm.trainer.verl.agent_ppo_trainer", "rllm.trainer.tinker.tinker_backend"),
            *("rllm.trainer.verl.patch", "rllm.trainer.verl.verl_backend", "rllm.trainer.fireworks"),
            "rllm.trainer.backend_protocol",
        ),
        _BACKEND,
    ),
    **dict.fromkeys(
        (
            *("rllm.experimental.fully_async", "rllm.experimental.fully_async.client"),
            *("rllm.experimental.fully_async.protocol", "rllm.experimental.fully_async.runner"),
        ),
        _ASYNC,
    ),
    **dict.fromkeys(
        (
            *("rllm.experimental.agents.sandboxed_agent", "rllm.experimental.agents.tool_calling"),
            *("rllm.experimental.agents.tools.bash_tool", "rllm.harnesses", "rllm.harnesses.react"),
        ),
        _HARNESSES,
    ),
    **dict.fromkeys(("rllm.tasks", "rllm.runner", "rllm.eval.runner", "rllm.eval.materialize"), _RUNNER),
    **dict.fromkeys(("rllm.eval.script_evaluator", "rllm.eval.module_evaluator"), _TASK_TESTS),
    "rllm.eval.episode_store": "rllm.store.EpisodeStore reads the episodes of a run; `rllm view` shows them.",
    "rllm.eval.proxy": "`rllm serve gateway --upstream URL` stands before any model server.",
    **dict.fromkeys((f"rllm.eval.reward_fns.{name}" for name in ("iou", "point_in_mask", "depth")), _MASKS),
    **dict.fromkeys(
        (f"rllm.eval.reward_fns.{name}" for name in ("claw_eval", "widesearch")),
        "its benchmark is not here, `rllm benchmark list` has those that are; judge with @rllm.evaluator.",
    ),
    "rllm.eval.reward_fns.frozenlake": "rllm.environments.FrozenLakeEnv pays its own moves.",
    "rllm.workflows.timing_mixin": "each Step has `timings`: `model_s`, `env_s`, `grader_s`.",
    "rllm.trainer.env_agent_mappings": "give the classes themselves; `rllm agent list` has their names.",
    **dict.fromkeys(("rllm.engine.agentflow_engine", "rllm.engine.remote_agent_flow_engine"), _PROGRAMS),
    **dict.fromkeys(("rllm.engine.agent_sdk_engine", "rllm.sdk.engine"), _PROGRAMS),
    "rllm.engine.rollout.completer": _PREFIXES,
    "rllm.engine.rollout.fireworks_engine": _SERVICE,
    "rllm.parser.chat_template_parser": "rllm.rendering.chat.ChatRenderer makes prompts, by the model's own "
    "template.",
    "rllm.tools.registry": _NO_REGISTRY,
    "rllm.gateway.manager": "a run starts its gateway itself; `rllm serve gateway` starts one alone "
    "(docs/gateway.md).",
    "rllm.utils.tracking": "`tracking.sinks` says where numbers go; docs/tracking.md has them.",
    "rllm.utils.visualization": "`rllm view` shows runs, episodes and their tokens (docs/view.md).",
    "rllm.env": _ENVIRONMENT,
    "rllm.experimental.opsd": _DISTILL,
    **dict.fromkeys(
        (
            *("rllm.agents.appworld_react_agents", "rllm.environments.appworld"),
            *("rllm.environments.appworld.appworld_env", "rllm.environments.appworld.signal_patch"),
        ),
        _APPWORLD,
    ),
    "rllm.tools.web_tools.gsearch_tool": "rllm.tools.SerperSearch asks for Google's results.",
}
"""Module -> successor, for modules without any counterpart."""


PACKAGES = frozenset(("rllm.trainer.config", "rllm.experimental.config"))
"""Packages of configuration files: `rllm/published/config` under these names."""


def _packages_of(modules: set[str]) -> set[str]:
    """Every package above these modules."""
    return {module.rsplit(".", depth)[0] for module in modules for depth in range(1, module.count("."))} - {
        "rllm"
    }


PARENTS = frozenset(_packages_of({*NAMES, *REFUSED_NAMES, *REFUSED_MODULES, *PACKAGES}))
"""Packages above published modules, which may be files here, or nothing."""
MODULES = frozenset({*NAMES, *REFUSED_NAMES, *PARENTS} - REFUSED_MODULES.keys())
"""All that resolves, wholly or in part."""
