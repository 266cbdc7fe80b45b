"""Libraries and services of others, behind the interfaces of the rooms before this one."""
