"""The platform of every process of a run that verl drives on the CPU, before verl looks for another one:

VERL_USE_EXTERNAL_MODULES=rllm.integrations.verl.plugin ──► `import verl` ──► use_cpu
"""

from rllm.integrations.verl.platform import use_cpu

use_cpu()
