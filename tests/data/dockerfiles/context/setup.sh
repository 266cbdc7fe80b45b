#!/bin/sh
echo ready > /app/ready
